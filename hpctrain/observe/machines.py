"""Other machines as text: the rows of `hpctrain what-if`, and the losses of `hpctrain plan search --if-lost`."""

from collections.abc import Sequence

from hpctrain.observe.text_tables import table, text_of
from hpctrain.planner.if_lost import ROADS, PricedLoss
from hpctrain.planner.prediction.forecast import format_waterfall
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.what_if import TOLERANCE, ComparedMachine

LOSS_COLUMNS = (
    "moves: masters and moments that ranks need by the next plan and do not own by the last one",
    "lost: those that no rank has in memory any more; they come from a copy or the last checkpoint",
    "given back: the stall, where RUN/resize asks for it and the ranks that leave hand over what they own",
    "from copies: the stall, where they died and the same command starts the others from recovery.copies",
    "restarted: the stall, where they died and it starts them from the last checkpoint",
)


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
        lines.append(f"predicted now: {now.prediction.mfu:.1%} of the peak of all devices (MFU)")
        families = now.machine.cluster.families.items()
        published = ((name, DeviceModel(name, family).efficiency.best_published) for name, family in families)
        lines += [f"best published of {name}: {best or 'nothing is known'}" for name, best in published]
    named: dict[str, str] = {}
    for row in rows:
        named = {text: row.machine.name for text in row.assumed} | named
    of_others = (f"{name}: {text}" for text, name in named.items() if text not in now.assumed)
    return "\n".join([*lines, "assumed", *(f"  {text}" for text in (*now.assumed, *of_others))])


def format_losses(rows: Sequence[PricedLoss]) -> str:
    """Return a table of losses, after the machine without one, and what is assumed."""
    figures = ["how many", "step, s", "tokens/s", "change", "moves, GB", "lost, GB", *(f"{road}, s" for road in ROADS)]
    columns = table("lost", *figures, numbers=figures)
    for priced in rows:
        prediction, change = priced.row.prediction, priced.row.change
        step = f"{prediction.step_seconds:,.4g}" if prediction else "-"
        cells = [f"{priced.loss.count}", step, f"{priced.row.tokens_per_second:,.0f}"]
        cells += ["" if priced is rows[0] else "none" if change is None else f"{change:+.1%}"]
        sizes = [f"{each / 1e9:,.3g}" for each in (priced.moved_bytes, priced.lost_bytes)]
        stalls = [f"{sum(parts.values()):,.3g}" for parts in priced.stall_seconds.values()]
        columns.add_row(priced.loss.name, *cells, *(sizes + stalls if stalls else ["-"] * (2 + len(ROADS))))
    lines = [text_of(columns), *LOSS_COLUMNS, rows[0].copies]
    if len(rows) == 1:
        lines.append("such a loss takes all devices")
    for priced in rows[1:]:
        if priced.row.plan is None:
            lines.append(f"{priced.loss.name}: no plan of those left: {priced.row.refusal}")
            continue
        lines.append(f"{priced.loss.name}: {priced.row.machine.cluster.describe()}: {priced.row.plan.describe()}")
        for road, parts in priced.stall_seconds.items():
            lines.append(f"  {road}: " + ", ".join(f"{part} {seconds:,.3g} s" for part, seconds in parts.items()))
    stalled = next((priced for priced in rows if priced.stall_seconds), None)
    if stalled is None:
        return "\n".join(lines)
    lines.append(
        f"restarted: about {stalled.repeated_steps:,.3g} steps since the last checkpoint are repeated, on the mean"
    )
    return "\n".join([*lines, "assumed", *(f"  {text}" for text in stalled.assumed)])


def _known(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
