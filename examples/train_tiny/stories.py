"""Short animal stories from a small grammar: plain English that a tiny model can really write.

Novels are too rich for 5.9M parameters; these stories are not. Who appears, where and with what is
free at the first mention and must agree later, so later blocks depend on earlier ones. Openings of
a sentence's variants differ, so one committed word settles much of a sentence.
"""

import re

import numpy as np

SLOTS = {
    "hero": "Tom Anna Peter Mary Jack Lucy Henry Jane Robert Emily Simon Ruth Adam Clara Ned Alice",
    "friend": "David Susan Paul Martha Philip Sarah John Kate Mark Helen Luke Rose Daniel Grace",
    "animal": "fox bear rabbit mouse cat dog horse sheep goat bird fish lion wolf pig duck cow",
    "other": "hare mole deer owl frog swan crow bee lamb donkey goose hen rat seal crab snail",
    "nature": "small young old brave happy quiet clever gentle proud lonely",
    "weather": "sunny rainy cold windy warm snowy",
}
PHRASES = {
    "home": "by the river|near the sea|in the forest|on a green hill|under an old bridge|"
    "behind the mill|at the edge of the village|in a little house of stone",
    "thing": "a golden key|a red ball|an old letter|a silver bell|a broken lamp|a large book|"
    "a black hat|a ring of gold|a wooden box|a map of the country",
    "spot": "under a tree|beside the road|in the grass|between two stones|at the bottom of a hole|"
    "on the sand",
    "owner": "the miller|the king|the old teacher|the captain|the baker|the queen|the gardener",
    "gift": "a basket of apples|a warm coat|a loaf of bread|a piece of honey cake|a new boat",
}
SENTENCES = (
    "Once there was a {nature} {animal} named {hero}, who lived {home}.|"
    "There lived {home} a {nature} {animal} whose name was {hero}.|"
    "Long ago a {nature} {animal} named {hero} lived {home}.",
    "Every morning {hero} went for a walk and looked at the sky.|"
    "Nobody came to see {hero}, and the days were very long.|"
    "The other animals liked {hero}, for the {animal} was always kind.|"
    "In the evening {hero} used to sit at the window and sing.",
    "One {weather} day {hero} found {thing} {spot}.|"
    "On a {weather} morning there lay {thing} {spot}, and {hero} saw it first.|"
    "It was a {weather} day when {hero} came upon {thing} {spot}.",
    '"What is this?" said {hero}. "I have never seen such a thing before."|'
    "{hero} took it home and put it on the table.|"
    "The {animal} looked at it for a long time and did not know what to do.",
    "Then {friend} the {other} came by and asked what had happened.|"
    "Just at that time {friend} the {other} knocked at the door.|"
    "A {other} named {friend} had seen it all and came nearer.",
    '"I know that it belongs to {owner}," said {friend}. "Let us bring it back."|'
    '{friend} said, "You must give it back to {owner}, who has lost it."|'
    '"Ask {owner}," said {friend}, "and you will hear the truth."',
    "So {hero} and {friend} walked together until it was dark.|"
    "They set out at once, {hero} in front and {friend} behind.|"
    "The way was long, but {hero} was not afraid, because {friend} was there.",
    "At last they came to {owner}, who was full of joy and gave them {gift}.|"
    'When {owner} saw them coming, there was great joy. "Take {gift}," they were told.|'
    "How glad was {owner}! The {animal} and the {other} were given {gift}.",
    "From that day on {hero} and {friend} were the best of friends.|"
    "And {hero} the {animal} was never alone again.|"
    "That night {hero} slept well, and so did {friend} the {other}.",
)
ASKS = (
    " Tell me a story about a {animal} named {hero}.",
    " Tell me a story about {hero} the {animal} and {friend} the {other}.",
    " Tell me a story.",
)
CHOICES = {name: words.split() for name, words in SLOTS.items()} | {
    name: phrases.split("|") for name, phrases in PHRASES.items()
}


def story(rng: np.random.Generator) -> tuple[str, str, str]:
    """(question, story, the hero's name)."""
    slots = {name: options[rng.integers(len(options))] for name, options in CHOICES.items()}
    lines = []
    for variants in SENTENCES:
        options = variants.split("|")
        lines.append(options[rng.integers(len(options))].format(**slots))
    ask = ASKS[rng.choice(3, p=(0.5, 0.3, 0.2))]
    return ask.format(**slots), " ".join(lines), slots["hero"]


def _pattern() -> re.Pattern:
    """Every sequence of sentences that the grammar has, slots filled independently."""
    pattern = " ".join(f"(?:{re.escape(variants)})".replace(r"\|", "|") for variants in SENTENCES)
    for name, options in CHOICES.items():
        pattern = pattern.replace(rf"\{{{name}\}}", f"(?:{'|'.join(map(re.escape, options))})")
    return re.compile(pattern)


PATTERN = _pattern()


def well_formed(text: str) -> bool:
    """Whether the text is a story of the grammar, letter by letter, and keeps to its characters."""
    kept = all(
        sum(bool(re.search(rf"\b{option}\b", text)) for option in CHOICES[slot]) <= 1
        for slot in ("hero", "friend", "animal", "other", "thing", "owner", "gift")
    )
    return kept and PATTERN.fullmatch(text) is not None
