"""Check that source and documentation use conventional phrases: ``python tests/prose.py [PATH ...]``.

Prints file, line, phrase and suggestion of every hit, and exits with 1 if there is one. The default is ``src docs``.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".md", ".jinja")

_UNIT = (
    "ms|milliseconds?|seconds|minutes|bytes|units|numbers?|rows?|files?|lines?|steps?|object|backwards?|forward passes"
)
_THING = "example|input|class|set|kind|label|layer|batch|pass|fit|pair|line|suite|severity|epoch|image|shape"

#: Regular expressions and suggestions. A space matches any gap between words, also a line break in a comment or string.
PHRASES: dict[str, str] = {
    rf"\b({_UNIT}) an? ({_THING})\b(?! of)": "'per', as in 'ms per example' or 'one file per kind'",
    r"\bonce an? (fit|batch|epoch|pass|shape|call|run)\b": "'once per'",
    r"\bso many\b(?! \w+ that)": "a count, or 'this number of'",
    r"\bhangs? on\b(?! (exit|import|start|close|windows|linux|macos))": "'depends on'",
    r"\bmend(s|ed|ing)?\b": "'fix'",
    r"\b(can|to) be had\b": "'available'",
    r"\b(takes?|taking|taken) stock\b": "'inspect'",
    r"(?<!-)\bstrange (inputs?|ones?|rows?|texts?|images?|data)\b|\bstrangers?\b": "'OOD inputs'",
    r"\b(quicker|quickest|as quick)\b": "'faster', 'as fast'",
    r"\b(needs?|no|more|enough|less|little|takes?) room\b|\broom (for|of|that|to)\b(?! improve)": "'memory', 'space'",
    r"\b(tells?|says?|said) (how|which|what|whether|where|when|why|so)\b": "'indicates', 'reports', 'names'",
    r"\bwhat ((an?|the|each|every|all) )?(?!you\b|we\b|users\b|people\b)\w+ sees?\b": "a noun: 'the layer inputs'",
    r'("""|#: )(What|Where|How)\b(?!.*\?)': "a noun or verb for what it is",
    r"\bof (its|their|one's) own\b": "'separate', or nothing",
    r"\b(is|are|was|were) there already\b": "'exists'",
    r"\ball that (is|was|has|have|an?|the|they|it|can|needs?|shares?)\b": "'everything', or the noun",
    r"\bcomes? back\b": "'is returned', 'is not modified'",
    r"\b(goes?|gone|went|going) on (from|with|where)\b": "'resume', 'continue'",
    r"\bby turns\b": "'in turns', 'alternately'",
    r"\bbeside a training example\b": "'relative to one training example'",
    r"\bwhatever (\w+ ){1,3}(is|are|was|were)\b": "'for any'",
    r"\bsure of (itself|it|them)\b": "'confident'",
    r"\bthat mean nothing\b": "'invalid'",
    r"\bon the way\b(?! to)": "'during', 'intermediate'",
    r"\bhand(s|ed)? in\b(?! hand)": "'pass', 'given'",
    r"^\s+\w+: (?-i:Of) (?!course)": "a noun first, as in 'seed: Seed of the samples'",
    r"\b(holdings|footprints?)\b": "'peak bytes'",
    r"\bpieces?\b(?! of (code|advice|software))": "'microbatch', 'part'",
    r"(?<!no\x20)(?<!without\x20)\bdoubts?\b": "'added probability', 'uncertainty'",
    r"\bcarry the news\b": "a plain statement",
}

_GAP = r"""(?:\s|\#:?|["']\s*\n\s*[fr]?["'])+"""
_PATTERNS = [
    (re.compile(phrase.replace(" ", _GAP), re.IGNORECASE | re.MULTILINE), suggestion)
    for phrase, suggestion in PHRASES.items()
]


@dataclass(frozen=True, order=True)
class Hit:
    """A phrase in a text, its line (counted from 1) and a suggestion."""

    line: int
    phrase: str
    suggestion: str


def find_hits(text: str) -> list[Hit]:
    """Return all hits in a text, sorted by line."""
    hits = []
    for pattern, suggestion in _PATTERNS:
        for match in pattern.finditer(text):
            start = match.start() + len(match[0]) - len(match[0].lstrip())
            hits.append(Hit(text.count("\n", 0, start) + 1, re.sub(_GAP, " ", match[0]).strip(), suggestion))
    return sorted(hits)


def find_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files to check below the paths."""
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (file for file in files if file.suffix in SUFFIXES)


def main(arguments: Sequence[str]) -> int:
    """Print all hits below the paths, and return 1 if there are any."""
    paths = [Path(name) for name in arguments] or [ROOT / "src", ROOT / "docs"]
    hits = [(path, hit) for path in find_files(paths) for hit in find_hits(path.read_text(encoding="utf-8"))]
    sys.stdout.writelines(f"{path}:{hit.line}: '{hit.phrase}': write {hit.suggestion}\n" for path, hit in hits)
    return int(bool(hits))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
