"""Write `rides.txt`, the text that the example learns: short accounts of bicycle rides, one in each paragraph.

    python examples/data/make_rides.py          # writes rides.txt beside this file, always the same bytes

The text is ours, so it needs no download and no licence. It is made of a small grammar with names that
stay the same within an account, so that there is always something more to learn: first letters, then
words, then sentences, then who rides with whom.
"""

from __future__ import annotations

import random
from pathlib import Path

TARGET = Path(__file__).with_name("rides.txt")
SIZE_BYTES = 256 * 1024

WORDS = {
    kind: words.split("|")
    for kind, words in {
        "rider": "Ada|Bruno|Clara|Dario|Elsa|Felix|Greta|Hugo|Irma|Jonas|Karla|Leo|Mira|Nils|Olga|Pavel",
        "place": "harbour|mill|old bridge|chapel|orchard|quarry|lighthouse|market|ferry|reservoir|station",
        "road": "coast road|farm track|long climb|river path|forest lane|valley road|gravel ridge",
        "weather": "the wind turned|rain began to fall|the fog lifted|the sun came out|it grew cold",
        "season": "spring|summer|autumn|winter",
        "day": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
        "hour": "five|six|seven|eight|nine|ten",
        "number": "two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|thirty",
        "part": "chain|front tyre|rear wheel|brake|saddle|bottle cage|left pedal",
        "fault": "began to squeak|came loose|needed a little oil|made a strange sound|had to be changed",
        "feeling": "tired|calm|proud|hungry|cheerful|quiet|wide awake|out of breath",
        "food": "bread and cheese|warm soup|apple cake|black coffee|plums from the orchard|cold noodles",
        "manner": "slowly|quickly|carefully|gladly|quietly|steadily",
        "thing": "the map|a spare tube|the pump|a lamp|the small bell|a dry jacket",
    }.items()
}

OPENINGS = [
    "On a {day} in {season}, {A} and {B} left the {place} at {hour} in the morning.",
    "It was {season}, and {A} met {B} at the {place} before {hour}.",
    "{A} had promised {B} a ride along the {road} on {day}.",
    "Every {day}, {A} and {B} rode from the {place} to the {other_place}.",
]

MIDDLES = [
    "{A} took the front, and {B} kept close behind, out of the wind.",
    "After {number} minutes they changed places, and {B} took the front.",
    "On the {road} {weather}, so they rode {manner}.",
    'The {part} {fault}, and {A} said, "Wait for me at the {other_place}."',
    '"How far is it to the {other_place}?" asked {B}. "About {number} miles," said {A}.',
    "Near the {other_place} {C} joined them with {thing}, and the line grew to three.",
    "{B} was {feeling}, but nobody fell behind, because each one sheltered the next.",
    "They counted {number} boats, {number} sheep and not one car.",
    "When the {road} became steep, {A} rode {manner} and {B} sang.",
    '"Hold the pace," said {B}, and {A} held the pace.',
    "At the {place} they stopped for {food}, and {A} was {feeling} again.",
    "{B} lent {A} {thing}, since {weather} near the {other_place}.",
]

ENDINGS = [
    "They were home by {hour} in the evening, {feeling} and {feeling}.",
    "At the {other_place} they ate {food} and said goodbye until {day}.",
    '"Again on {day}?" asked {A}. "Again on {day}," said {B}.',
    "So the ride ended where it had begun, at the {place}, and {A} slept well.",
]


def pick(rng: random.Random, items: list[str]) -> str:
    # random() alone is promised to give the same numbers in every version of Python; choice() is not.
    return items[int(rng.random() * len(items))]


def pick_different(rng: random.Random, items: list[str], count: int) -> list[str]:
    left, chosen = list(items), []
    for _ in range(count):
        chosen.append(left.pop(int(rng.random() * len(left))))
    return chosen


class Scene(dict[str, str]):
    """Fills the slots of a sentence: what was fixed for this account, or else any word of that kind."""

    def __init__(self, rng: random.Random) -> None:
        riders = pick_different(rng, WORDS["rider"], 3)
        places = pick_different(rng, WORDS["place"], 2)
        super().__init__(zip("ABC", riders, strict=True), place=places[0], other_place=places[1])
        self.rng = rng

    def __missing__(self, kind: str) -> str:
        return pick(self.rng, WORDS[kind])


def account(rng: random.Random) -> str:
    scene = Scene(rng)
    middles = pick_different(rng, MIDDLES, 3 + int(rng.random() * 4))
    sentences = [pick(rng, OPENINGS), *middles, pick(rng, ENDINGS)]
    return " ".join(sentence.format_map(scene) for sentence in sentences)


def make_text(size_bytes: int = SIZE_BYTES, seed: int = 2) -> str:
    rng = random.Random(seed)
    paragraphs: list[str] = []
    length = 0
    while length < size_bytes:
        paragraphs.append(account(rng))
        length += len(paragraphs[-1]) + 2
    return "\n\n".join(paragraphs) + "\n"


if __name__ == "__main__":
    TARGET.write_text(make_text(), encoding="ascii", newline="\n")
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes")
