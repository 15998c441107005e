"""The names under which the folders are imported."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import rajax
import rajax.kernels
import rajax.models

ROOT = Path(__file__).parent.parent


def test_the_folders_are_imported_under_rajax():
    for module, folder in ((rajax.kernels, "kernels"), (rajax.models, "models")):
        ours = Path(str(module.__file__))
        assert ours.read_text() == (ROOT / folder / "__init__.py").read_text()


def test_no_top_level_name_is_taken():
    """transformers imports a package called `kernels`, and must not find ours."""
    assert str(ROOT) not in sys.path
    for name in ("kernels", "models"):
        spec = importlib.util.find_spec(name)
        assert spec is None or not str(spec.origin).startswith(str(ROOT))


def test_importing_rajax_needs_none_of_the_extras():
    code = (
        "import sys, rajax, rajax.cli, rajax.convert, rajax.smollm2\n"
        "print(sorted({'torch', 'transformers', 'gguf', 'tensorflow'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_floors_import_only_downwards():
    """kernels know nothing of models, models nothing of ScaNN, files and the host."""
    for folder, allowed in (
        ("kernels", ("rajax.kernels", "os")),
        ("models", ("rajax.kernels", "rajax.models")),
    ):
        for file in (ROOT / folder).glob("*.py"):
            for line in file.read_text().splitlines():
                words = line.split()
                if words[:1] in (["import"], ["from"]) and words[1].startswith(
                    ("rajax", "scann", "orbax", "os")
                ):
                    assert words[1].startswith(allowed), f"{file}: {line}"
