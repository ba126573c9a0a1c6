"""Comparisons and statistics as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from treegraft.bench.check import Check, Deviation, Origin
    from treegraft.bench.choice import Candidate
    from treegraft.bench.comparison import ArmSummary, Comparison
    from treegraft.core.stats import Statistics
    from treegraft.scheduling.evaluate import Evaluation
    from treegraft.scheduling.fit import Fitted

__all__ = [
    "check_report",
    "comparison_report",
    "evaluation_report",
    "fit_report",
    "new_table",
    "slower_in_words",
    "statistics_report",
    "text_row",
]


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def text_row(table: Table, *cells: str) -> None:
    # Text and not str: names of models may hold what rich takes for markup.
    table.add_row(*(Text(cell) for cell in cells))


def comparison_report(comparison: Comparison) -> Group:
    """Speed, work and seconds of every arm, and speed by kind of prompt."""
    summaries = comparison.summaries()
    base = comparison.arms[0]
    parts = [_speed(summaries, base), _seconds(summaries)]
    if any(s.statistics.drafters for s in summaries):
        parts.append(_drafters(summaries))
    if len(comparison.kinds) > 1:
        parts.append(_kinds(comparison))
    spaced: list[Table | Text] = []
    for part in parts:
        spaced += [part, Text("")]
    return Group(*spaced[:-1])


def _speed(summaries: list[ArmSummary], base: str) -> Table:
    table = new_table(
        "Speed (tokens per second of decoding, prefill included)",
        "config",
        "tokens/s",
        f"x {base}",
        "median",
        "10-90 %",
        "tokens/call",
        "new tokens",
        "target calls",
        "tokens",
    )
    for s in summaries:
        n = len(s.differences)
        text_row(
            table,
            s.name,
            f"{s.statistics.tokens_per_second:.1f}",
            f"{s.ratio.total:.2f}",
            f"{s.ratio.median:.2f}",
            f"{s.ratio.low:.2f}-{s.ratio.high:.2f}",
            f"{s.statistics.mean_accepted_length:.2f}",
            str(s.statistics.new_tokens),
            str(s.statistics.target_calls),
            "same law" if s.same_law else "identical" if s.identical else f"DIFFER in {n} texts",
        )
    return table


def _seconds(summaries: list[ArmSummary]) -> Table:
    stages = list(summaries[0].seconds)
    table = new_table("Shares of the seconds", "config", "seconds", *stages, "no forward")
    for s in summaries:
        total = sum(s.seconds.values())
        shares = [f"{seconds / max(total, 1e-9):.0%}" for seconds in s.seconds.values()]
        overhead = f"{s.statistics.overhead_share:.0%}"
        text_row(table, s.name, f"{total:.2f}", *shares, overhead)
    table.caption = "no forward: neither in a forward of the target (prefill too) nor of a drafter"
    table.caption_justify = "left"
    return table


def _drafters(summaries: list[ArmSummary]) -> Table:
    table = new_table(
        "Drafters (nodes by the drafter that proposed them first)", "config", *_DRAFTER_COLUMNS
    )
    table.columns[1].justify = "left"
    for s in summaries:
        for name, figures in _by_drafter(s.statistics).items():
            if not s.statistics.visits[name]:
                continue
            text_row(table, s.name, name, *figures)
    table.caption = (
        "proposed: as the first or after others; alone: accepted, and proposed by nobody else; by "
        "depth: accepted at depth 1, 2, ...; who was never called is left out"
    )
    table.caption_justify = "left"
    return table


_DRAFTER_COLUMNS = (
    "drafter",
    "calls",
    "seconds",
    "proposed",
    "drafted",
    "kept",
    "accepted",
    "alone",
    "by depth",
)


def _by_drafter(statistics: Statistics) -> dict[str, tuple[str, ...]]:
    s = statistics
    return {
        name: (
            str(s.calls[i]),
            f"{s.drafter_seconds[name]:.2f}",
            str(s.proposed[i]),
            str(s.drafted[i]),
            str(s.kept[i]),
            str(s.accepted[i]),
            str(s.accepted_alone[i]),
            " ".join(map(str, s.accepted_by_depth[i])),
        )
        for i, name in enumerate(s.drafters)
    }


def _kinds(comparison: Comparison) -> Table:
    base, *others = comparison.arms
    table = new_table(f"Ratio to {base} by kind of prompt", "kind", "prompts", *others)
    for kind, n in comparison.kinds.items():
        ratios = [f"{comparison.ratio(arm, kind).total:.2f}" for arm in others]
        text_row(table, kind, str(n), *ratios)
    return table


def slower_in_words(comparison: Comparison) -> list[str]:
    """One sentence for each arm that is slower than the first."""
    base = comparison.arms[0]
    return [
        f"{s.name} is slower than {base} on these prompts: {s.ratio.total:.2f} times its speed."
        for s in comparison.summaries()[1:]
        if s.ratio.total < 1.0
    ]


def statistics_report(statistics: Statistics) -> Group:
    """The figures of a run with their definitions."""
    from treegraft.bench.comparison import stage_seconds
    from treegraft.core.stats import DEFINITIONS

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    figures = {
        "new_tokens": f"{statistics.new_tokens}",
        "target_calls": f"{statistics.target_calls}",
        "mean_accepted_length": f"{statistics.mean_accepted_length:.2f}",
        "tokens_per_second": f"{statistics.tokens_per_second:.1f}",
        "tokens_per_second_decode": f"{statistics.tokens_per_second_decode:.1f}",
    }
    for key, value in figures.items():
        table.add_row(Text(key), Text(value), Text(DEFINITIONS[key], style="dim"))
    seconds = ", ".join(f"{k} {v:.3f}" for k, v in stage_seconds(statistics).items())
    parts: list[Table | Text] = [table, Text(f"seconds: {seconds}")]
    for name, counts in statistics.forwards.items():
        ran = f"{counts.compiled} compiled, {counts.eager} eager, {counts.outside} outside"
        parts.append(Text(f"forwards of {name}: {ran}"))
    if statistics.drafters:
        drafters = new_table("", *_DRAFTER_COLUMNS)
        for name, cells in _by_drafter(statistics).items():
            text_row(drafters, name, *cells)
        parts.append(drafters)
    return Group(*parts)


_MOST_TIES = 3
"""Ties of a text that are spelled out; the report in JSON has all of them."""


def check_report(check: Check) -> Group:
    """One row per prompt and mode, then every fault and the first ties of each text in words."""
    columns = ("prompt", "mode", "verdict", "tokens", "drafted", "ties")
    table = new_table("Drafted tokens against plain decoding", *columns)
    table.columns[1].justify = table.columns[2].justify = "left"
    remarks: list[str] = []
    for v in check.verdicts:
        verdict = "FAULT" if v.fault is not None else v.verdict
        text_row(
            table, v.prompt, v.mode, verdict, *map(str, (v.n_tokens, v.n_accepted, len(v.ties)))
        )
        where = f"{v.prompt}, {v.mode}"
        remarks += [f"tie in {where}: {_deviation(tie)}" for tie in v.ties[:_MOST_TIES]]
        if len(v.ties) > _MOST_TIES:
            remarks.append(f"{len(v.ties) - _MOST_TIES} more ties in {where} (all with --json)")
        if v.fault is not None:
            remarks.append(f"FAULT in {where}: {_deviation(v.fault)}")
        remarks += [f"note on {where}: {notice}" for notice in v.notices]
    parts: list[Table | Text] = [table]
    if remarks:
        parts += [Text(""), *map(Text, remarks)]
    return Group(*parts)


def _deviation(deviation: Deviation) -> str:
    choice = deviation.choice
    sentence = (
        f"token {deviation.position} of the text (new token {deviation.new}): expected "
        f"{_candidate(choice.expected)}, found {_candidate(choice.found)}"
    )
    if choice.expected is not None and choice.expected.token != choice.first.token:
        sentence += f", the target's first choice is {_candidate(choice.first)}"
    sentence += f"; gap {choice.gap:.3g}, rounding explains {choice.tolerance:.3g}"
    return sentence if deviation.origin is None else f"{sentence}; {_origin(deviation.origin)}"


def _candidate(candidate: Candidate | None) -> str:
    if candidate is None:
        return "the end"
    compared = candidate.value != candidate.logit
    value = f", {candidate.value:.6g} as sampled" if compared else ""
    return f"{candidate.token} (logit {candidate.logit:.6g}{value})"


def _origin(origin: Origin) -> str:
    if origin.node is None:
        after = "the root" if origin.parent == 0 else f"node {origin.parent}"
        return f"step {origin.step}, bonus token after {after}, no node"
    return (
        f"step {origin.step}, node {origin.node} at depth {origin.depth}, proposed by "
        f"{origin.drafter or 'nobody known'}"
    )


def fit_report(fitted: Fitted) -> Group:
    """Predicted tokens per second of every split, by scheduler."""
    bounded = any("ceiling" in metrics for metrics in fitted.metrics.values())
    arms = ["plain", "never", "always", "best_fixed", "value", "oracle"]
    shares = {"share": "oracle_share"}
    if bounded:
        arms.insert(5, "ceiling")
        shares["ceiling's"] = "ceiling_share"
    table = new_table(
        "Tokens per second, as the cost model predicts", "split", "steps", *arms, *shares
    )
    for name, metrics in fitted.metrics.items():
        rates = [f"{metrics[arm]:.1f}" if arm in metrics else "-" for arm in arms]
        kept = [f"{metrics[key]:.0%}" if key in metrics else "-" for key in shares.values()]
        text_row(table, name, f"{metrics['steps']:.0f}", *rates, *kept)
    calls = ", ".join(fitted.best_fixed) or "no drafting"
    legend = ["share: of the oracle's gain over the better endpoint, what value keeps"]
    if bounded:
        half = fitted.metrics["all"]["ceiling_of_half"]
        legend.append(
            "ceiling: boosted trees on the same features, cross-validated by prompt; half as many "
            f"prompts bring it to {half:.1f}"
        )
    else:
        legend.append("ceiling: left out; --ceiling finds it (treegraft[ceiling])")
    scaled = fitted.artefact.header["cost_scaled"]
    return Group(
        *([Text(f"cost-scaled: {scaled}", style="bold")] if scaled else []),
        table,
        Text(f"best fixed schedule: {calls}"),
        *(Text(line, style="dim") for line in legend),
    )


def evaluation_report(evaluation: Evaluation) -> Group:
    """A fitted scheduler by suite, who drafted in which layer, and how far the costs are right."""
    data = evaluation.as_dict()
    keys = {
        "x paper": "value_to_paper_endpoint",
        "x plain": "value_to_plain",
        "x better": "value_to_better_endpoint",
        "best fixed": "best_fixed_to_better_endpoint",
        "ceiling": "ceiling_to_better_endpoint",
        "oracle": "oracle_to_better_endpoint",
    }
    shares = {"share": "oracle_share", "ceiling's": "ceiling_share"}
    if data["mean"]["ceiling_share"] is None:
        del keys["ceiling"], shares["ceiling's"]
    table = new_table(
        "value over the better endpoint (measured; oracle, ceiling and shares predicted)",
        "suite",
        *keys,
        *shares,
        "tokens",
    )
    for suite, figures in {**data["suites"], "mean": data["mean"]}.items():
        shown = ["-" if figures[k] is None else f"{figures[k]:.2f}" for k in keys.values()]
        kept = ["-" if figures[k] is None else f"{figures[k]:.0%}" for k in shares.values()]
        text_row(table, suite, *shown, *kept, "identical" if figures["identical"] else "DIFFER")
    speed = new_table(
        "Decoding", "scheduler", "tokens/s", "tokens/call", "predicted/measured", "calls"
    )
    for arm in evaluation.comparison.arms:
        error = data["predicted_over_measured"].get(arm)
        calls = " ".join(
            "/".join(str(n) for n in layer.values()) for layer in data["calls_by_layer"][arm]
        )
        text_row(
            speed,
            arm,
            f"{data['tokens_per_second'][arm]:.1f}",
            f"{data['mean_accepted_length'][arm]:.2f}",
            "-" if error is None else f"{error:.2f}",
            calls or "none",
        )
    drafters = "/".join(evaluation.comparison.statistics("value").drafters)
    legend = [
        f"calls: {drafters} by layer; decisions take {evaluation.scheduler_share:.1%} of value's "
        "steps",
        "x paper, x plain: over the better endpoint with the paper's tree, over no drafting; "
        "share: of the oracle's gain",
    ]
    if "ceiling" in keys:
        legend.append("ceiling: boosted trees on the same features, grown on traces of others")
    else:
        legend.append("ceiling: left out; --ceiling TRACES finds it (treegraft[ceiling])")
    scaled = data["cost_scaled"]
    return Group(
        *([Text(f"cost-scaled: {scaled}", style="bold")] if scaled else []),
        table,
        Text(""),
        speed,
        *(Text(line, style="dim") for line in legend),
    )
