"""Words and phrases for exercises, made up or English."""

# ruff: noqa: SIM905 (a hundred words read better as text than as a list of literals)

import random
import string

# Excluded from training: they measure whether the model learned to spell, not which words exist.
ENGLISH_WORDS = tuple(
    """
    apple autumn badger bakery banana barrel basket beacon beaver blanket bottle branch bridge
    bubble bucket butter button cabbage candle canyon carpet carrot castle cellar chapel cheese
    cherry chimney circle clover coffee copper corner cotton cradle cricket crystal curtain dagger
    daisy desert dinner dollar dragon drawer eagle engine falcon feather finger flower forest
    fountain garden garlic ginger glacier goblet gravel guitar hammer harbor hazel helmet honey
    island jacket jungle kettle kitchen kitten ladder lantern lemon letter library lizard magnet
    maple marble market meadow melon mirror monkey morning mountain muffin napkin needle noodle
    oasis ocean olive onion orange orchard otter oyster paddle palace panther paper parrot pebble
    pencil pepper pepperoni pigeon pillow planet plum pocket potato puddle puzzle rabbit rainbow
    raven ribbon river rocket saddle salmon satchel school shadow silver singer spider spring
    squirrel station stone summer table temple thunder ticket tiger timber tomato towel tractor
    train tunnel turtle umbrella valley velvet village violin wagon walnut water whisper willow
    window winter wizard yellow zebra zipper
    """.split()
)

_ONSETS = (
    "b c d f g h j k l m n p qu r s t v w x y z bl br ch cr dr fl gr pl sh sl st th tr".split()
)
_VOWELS = "a e i o u a e i o u ai ea ee oo ou".split()
_CODAS = ["", "", "", *"n r s t l m ck ng st nd ll rt x p d".split()]

_SCRIPTS = (
    (0x00E0, 0x00FF),  # Latin with accents
    (0x03B1, 0x03C9),  # Greek
    (0x0430, 0x044F),  # Cyrillic
    (0x05D0, 0x05EA),  # Hebrew
    (0x0627, 0x064A),  # Arabic
    (0x0905, 0x0939),  # Devanagari
    (0x2190, 0x21FF),  # arrows
    (0x3041, 0x3096),  # Hiragana
    (0x4E00, 0x9FA5),  # Chinese
    (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3),  # Hangul
    (0x1F300, 0x1F5FF),  # pictures
    (0x1F600, 0x1F64F),  # faces
    (0x1F680, 0x1F6C5),  # vehicles
)


def made_up_word(rng: random.Random) -> str:
    """Two to twelve small letters, mostly pronounceable."""
    kind = rng.random()
    if kind < 0.2:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 12)))
    if kind < 0.35:  # few different letters, so that a letter alone does not show the position
        letters = rng.sample(string.ascii_lowercase, 3)
        return "".join(rng.choices(letters, k=rng.randint(3, 12)))
    syllables = [
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((1, 2, 2, 3, 3)))
    ]
    return "".join(syllables)[:12]


def phrase(rng: random.Random) -> str:
    """One to seven words, numbers or strings of signs in ASCII."""
    if rng.random() < 0.15:
        return "".join(rng.choices(string.ascii_letters + string.punctuation, k=rng.randint(3, 20)))
    words = []
    for _ in range(rng.randint(1, 7)):
        word = made_up_word(rng)
        if rng.random() < 0.15:
            word = str(rng.randrange(10_000))
        if rng.random() < 0.15:
            word = word.capitalize()
        words.append(word + rng.choice(("", "", "", "", ",")))
    return " ".join(words).strip(",") + rng.choice(("", "", ".", "!", "?"))


def phrase_beyond_ascii(rng: random.Random) -> str:
    """One to ten characters of two to four bytes each, from one or two scripts."""
    scripts = rng.choices(_SCRIPTS, k=2)
    characters = [chr(rng.randint(*rng.choice(scripts))) for _ in range(rng.randint(1, 10))]
    return "".join(c + (" " if rng.random() < 0.08 else "") for c in characters).strip()
