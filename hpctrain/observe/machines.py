"""The answer of `hpctrain what-if` as text: a row for each machine."""

from collections.abc import Sequence

from hpctrain.observe.text_tables import table, text_of
from hpctrain.planner.prediction.forecast import format_waterfall
from hpctrain.planner.what_if import TOLERANCE, ComparedMachine


def format_machines(rows: Sequence[ComparedMachine], currency: str, shows_share: bool) -> str:
    """Return a table of machines, the first of which the others are compared with, and what is assumed.

    Without a `currency` there are no prices; `shows_share` says whether losses count.
    """
    figures = ["tokens/s", "from", "to", "change"] + ["trains"] * shows_share
    figures += [f"tokens/{currency}"] * bool(currency) + ["tokens/kWh"]
    columns = table("machine", *figures, "where its step goes", numbers=figures)
    for row in rows:
        change = "" if row is rows[0] else "none" if row.change is None else f"{row.change:+.1%}"
        cells = [f"{value:,.0f}" for value in (row.tokens_per_second, *row.interval)] + [change]
        cells += [f"{row.effective_share:.2%}"] if shows_share else []
        cells += [_known(row.tokens_per_money)] if currency else []
        columns.add_row(row.machine.name, *cells, _known(row.tokens_per_kwh), row.bounded_by)
    now, lines = rows[0], [text_of(columns)]
    lines.append(f"none: less than {TOLERANCE:.0%}, which a search may miss; from, to: the range of the prediction")
    for row in rows:
        if row.plan is not None and (row is now or row.change):
            lines.append(f"{row.machine.name}: {row.machine.cluster.describe()}: {row.plan.describe()}")
    if now.prediction:
        lines.append(f"of a step now: {format_waterfall(now.prediction.waterfall_seconds)}")
    named: dict[str, str] = {}
    for row in rows:
        named = {text: row.machine.name for text in row.assumed} | named
    of_others = (f"{name}: {text}" for text, name in named.items() if text not in now.assumed)
    return "\n".join([*lines, "assumed", *(f"  {text}" for text in (*now.assumed, *of_others))])


def _known(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
