"""Every part with every other: scorers, selectors, schedules, quantities and codecs, as schemes and their options.

`python tests/combinations.py` writes the table in docs/explanation/combinations.md; a test compares the page with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "combinations.md"
BEGIN, END = "<!-- made by tests/combinations.py -->", "<!-- end -->"

SCORERS = ("magnitude", "average", "predicted", "influence")
SELECTORS = ("exclusive", "own", "granular")
SCHEDULES = ("at once", "in flight", "ahead", "every H")
QUANTITIES = ("gradient", "drift")
CODECS = ("fp32", "fp16", "bf16", "int8", "int4", "int2", "sign", "momentum-int8")
H = 3
MASKS = {"exclusive": "owners", "own": "own", "granular": "granular"}


class Combination(NamedTuple):
    """One choice of each part but the codec."""

    quantity: str
    selector: str
    scorer: str
    schedule: str

    @property
    def options(self) -> dict[str, Any]:
        """The scheme that has these parts, and its options."""
        mine: dict[str, Any] = {"scorer": self.scorer}
        if self.quantity == "drift":
            more = {"in flight": {"staleness": 1}, "ahead": {"tolerance": 1e-3}, "every H": {"every": H}}
            return {"scheme": "drift", "masks": MASKS[self.selector], **mine, **more.get(self.schedule, {})}
        if self.selector == "granular" or self.schedule == "ahead":
            return {"scheme": "speculative", **mine, **self._speculative()}
        more = {"in flight": {"staleness": 1}, "every H": {"every": H}}
        return {"scheme": "exdyna", "masks": MASKS[self.selector], **mine, **more.get(self.schedule, {})}

    def _speculative(self) -> dict[str, Any]:
        chosen = {"exclusive": {"masks": "owners"}, "own": {"granularity": "fine"}, "granular": {"granularity": "hybrid"}}
        more = {"at once": {"staleness": 0}, "in flight": {"staleness": 1, "tolerance": 0.0}, "every H": {"every": H}}
        return {**chosen[self.selector], **more.get(self.schedule, {})}


def combinations() -> Iterator[Combination]:
    """All of them, in the order of the table."""
    for parts in itertools.product(QUANTITIES, SELECTORS, SCORERS, SCHEDULES):
        yield Combination(*parts)


def refusal(options: dict[str, Any]) -> str:
    """Why the constructor refuses options, or an empty text."""
    from mpisparse.errors import ConfigurationError
    from mpisparse.schemes import configure

    given = dict(options)
    try:
        configure(given.pop("scheme"), **given)
    except ConfigurationError as error:
        return str(error)
    return ""


def page() -> str:
    """The tables and the reasons, as the page has them."""
    reasons: dict[str, int] = {}
    lines = []
    for quantity in QUANTITIES:
        lines += [f"With a {quantity}:", "", f"| selector | scorer | {' | '.join(SCHEDULES)} |", "|---|---|" + "---|" * 4]
        for selector, scorer in itertools.product(SELECTORS, SCORERS):
            cells = []
            for schedule in SCHEDULES:
                combination = Combination(quantity, selector, scorer, schedule)
                why = refusal(combination.options)
                number = reasons.setdefault(why, len(reasons) + 1) if why else 0
                cells.append(f"refused ({number})" if why else f"`{combination.options['scheme']}`")
            lines.append(f"| {selector} | {scorer} | {' | '.join(cells)} |")
        lines.append("")
    lines += ["The constructor refuses the rest with these words:", "", "| number | error |", "|---|---|"]
    lines += [f"| {number} | `{why}` |" for why, number in reasons.items()]
    return "\n".join([BEGIN, "", *lines, "", END])


def rewritten(text: str) -> str:
    """A page with the present tables in it."""
    before, _, rest = text.partition(BEGIN)
    return before + page() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
