"""The tokens of the busiest and the idlest expert of each layer in one step."""

from markupsafe import Markup

from hpctrain.observe.folder.schema import EXPERTS
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import Panel, Svg, show_count, show_whole

LEFT, HEIGHT = 58, 176
ENDS = ("f5", "busiest", max), ("f0", "idlest", min)


def expert_panel(run: RunRecord) -> Panel:
    """Return the loads of experts by layer, over the mean of each."""
    if not run.experts:
        return Panel("Nothing is known of single experts", lambda width: None)
    layers = run.experts["layers"]
    loads = [[count * len(of["tokens"]) / max(1, sum(of["tokens"])) for count in of["tokens"]] for of in layers]
    worst = max(range(len(loads)), key=lambda at: max(loads[at]))
    expert = loads[worst].index(max(loads[worst]))
    title = Markup("Expert {} of layer {} has {} tokens in step {}, {:.2f} times the mean").format(
        expert,
        layers[worst]["layer"],
        run.figure("{:,}".format, EXPERTS.name, "layers", worst, "tokens", expert),
        run.figure("{:,}".format, EXPERTS.name, "step"),
        loads[worst][expert],
    )

    def draw(width: int) -> Svg:
        numbers = [of["layer"] for of in layers]
        svg = Svg(width, "load of experts by layer", [(colour, name) for colour, name, _ in ENDS], gap=38)
        x = svg.axis_x((min(numbers) - 1, max(numbers) + 1), LEFT, HEIGHT, show_whole, "layer")
        y = svg.axis_y((0.0, 1.06 * max(map(max, loads))), LEFT, HEIGHT, show_count, "load")
        for at, (of, shares) in enumerate(zip(layers, loads, strict=True)):
            svg.line(x(of["layer"]), y(min(shares)), x(of["layer"]), y(max(shares)))
            for colour, _, end in ENDS:
                number = shares.index(end(shares))
                count, source = of["tokens"][number], f"{run.name}/{EXPERTS.name}:layers.{at}.tokens.{number}"
                text = f"layer {of['layer']}, expert {number}: {count:,} tokens, {shares[number]:.2f} of the mean"
                place = x(of["layer"]), y(shares[number])
                svg.circle(*place, 3, colour, text, data_from=source, data_value=repr(count))
        return svg

    return Panel(title, draw, "The busiest and the idlest expert of each layer, over its mean: 1 is even.")
