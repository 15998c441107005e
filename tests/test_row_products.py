"""Products with stored rows in vector registers, against float64."""

import ml_dtypes
import numpy as np
import pytest
from numba import njit

from rajax.host_layer import bits
from rajax.kernels.row_products import TOGETHER, add_picked, add_rows, score_picked, score_rows


@njit
def scored(queries, rows, start, stop, width, scores, at):
    score_rows(queries, rows, start, stop, width, scores, at)


@njit
def added(weights, at, rows, first, width, sums):
    add_rows(weights, at, rows, first, width, sums)


@njit
def scored_picked(queries, rows, picked, width, scores):
    score_picked(queries, rows, picked, width, scores)


@njit
def added_picked(weights, rows, picked, width, sums):
    add_picked(weights, rows, picked, width, sums)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("width", [1, 8, 20, 64, 80, 128])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7])
def test_scores_and_sums_of_rows(heads, width, dtype):
    draw = np.random.default_rng(heads * width)
    rows = draw.standard_normal((19 + TOGETHER, width)).astype(dtype)
    exact = rows.astype(np.float64)
    queries = draw.standard_normal((heads, width)).astype(np.float32)
    # From row 3 to before row 16 are no whole number of fours: up to three columns more may be written.
    scores = np.full((heads, 24), np.nan, np.float32)
    scored(queries, bits(rows), 3, 16, width, scores, 5)
    np.testing.assert_allclose(scores[:, 5:18], queries @ exact[3:16].T, rtol=1e-5, atol=1e-5)
    assert np.isnan(np.delete(scores, np.s_[5:21], axis=1)).all()

    weights = np.full((heads, 9), np.nan, np.float32)
    weights[:, 3:7] = draw.standard_normal((heads, TOGETHER))
    sums = draw.standard_normal((heads, width)).astype(np.float32)
    expected = sums + weights[:, 3:7].astype(np.float64) @ exact[11:15]
    added(weights, 3, bits(rows), 11, width, sums)
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-5)

    picked = draw.integers(0, len(rows), 12)
    scores = np.full((heads, 13), np.nan, np.float32)
    scored_picked(queries, bits(rows), picked, width, scores)
    np.testing.assert_allclose(scores[:, :12], queries @ exact[picked].T, rtol=1e-5, atol=1e-5)
    assert np.isnan(scores[:, 12]).all()

    weights = draw.standard_normal((heads, 12)).astype(np.float32)
    expected = sums + weights.astype(np.float64) @ exact[picked]
    added_picked(weights, bits(rows), picked, width, sums)
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-5)
