"""Names are those of the vocabulary: one word for one thing, one class for a name."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "hpctrain"
AVOIDED = {
    "told": "report, format, to_json",
    "tell": "report, format, to_json",
    "tells": "report, format, to_json",
    "beside": "overlapped",
    "slab": "region",
    "slabs": "regions",
    "weigh": "score",
    "weighed": "scored",
    "unlike": "mixed, different",
    "alike": "equivalent, equal",
    "substeps": "row chunks",
    "found": "result",
    "because": "reasons",
}


def names(source: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def test_no_identifier_has_a_word_that_the_vocabulary_replaces():
    wrong = {}
    for path in PACKAGE.rglob("*.py"):
        for name in names(path.read_text()) - {"FileNotFoundError"}:
            parts = {part.lower() for part in re.findall(r"[a-z]+|[A-Z][a-z]*", name.replace("_", " "))}
            for word in parts & AVOIDED.keys():
                wrong[f"{path.relative_to(PACKAGE)}: {name}"] = f"say {AVOIDED[word]}"
    assert not wrong


def test_each_class_has_a_name_of_its_own():
    count = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, times in count.items() if times > 1]
