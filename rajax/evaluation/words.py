"""Words that stand for nothing: keys of needles, and lists to count in."""

from __future__ import annotations

import functools
import re

from rajax.haystack import prose

ADJECTIVES = tuple(
    """able amber ancient angry awake bitter bold brave brief bright broad calm careful cheap clean clever cloudy cold
    common cozy crisp curious damp dark deep distant dry dull eager early easy elegant empty faint fair famous fancy
    fast fierce firm flat fond fragile free fresh full gentle giant glad golden grand gray great green happy hard heavy
    hollow honest humble hungry icy idle jolly keen kind large late lazy lean light little lively lone long loud loyal
    lucky mellow merry mild modest narrow neat new noble odd old open pale patient plain polite proud quick quiet rapid
    rare ready rich ripe rough round royal rusty salty sharp shiny short shy silent simple sleepy slow small smooth
    soft sour spicy steady steep still strange strong sunny sweet swift tall tame tender thin tidy tiny tough vast
    velvet warm weary wet whole wide wild wise witty young""".split()  # noqa: SIM905 - a list would take a line a word
)
NOUNS = tuple(
    """acorn anchor apple arrow aunt badge bakery bamboo banjo barrel basket beach beacon bell bench berry bishop
    blanket boat bottle branch bread bridge brook broom brush bucket butter button cabin cactus camel candle canoe
    canyon carpet castle cave chair cherry circus citizen cloud clover coach coast coin comet copper corner cotton
    cousin cradle crane cricket crow crown curtain daisy dancer desert dinner doctor donkey drawer dream drum eagle
    engine falcon farmer feather fence ferry fiddle field finch flame flute forest fountain fox garden garlic glacier
    glove goose granite grape guitar hammer harbor harvest hawk helmet heron hill honey horse hotel island ivory
    jacket jewel judge jungle kettle kitchen kite knight ladder lake lamp lantern lemon letter library lily lion
    lizard lobster locket magnet mango maple marble market meadow medal melon mirror monkey moon mountain museum
    needle nephew nest oak ocean olive onion orchard organ otter owl oyster paddle palace panther paper parrot peach
    pencil pepper piano pigeon pillow pilot pine planet plum pocket poet pond poppy potato pumpkin puzzle rabbit
    radish raven ribbon river robin rocket rose saddle sailor salmon scarf school shadow shell ship shore silver
    singer sister spider spoon squirrel stable statue stone storm stream sugar summer swan table tailor teacher temple
    thunder ticket tiger timber tower tractor train treasure trumpet tulip tunnel turtle umbrella valley village
    violin wagon wallet walnut whale wheat window winter wizard wolf yard""".split()  # noqa: SIM905
)


@functools.cache
def compounds() -> tuple[str, ...]:
    """Such as "rusty-anchor"."""
    return tuple(f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS)


@functools.cache
def plain() -> tuple[str, ...]:
    """Words of four letters and more from the prose that Python carries, and those above."""
    return tuple(sorted({*re.findall(r"\b[a-z]{4,}\b", prose()), *ADJECTIVES, *NOUNS}))
