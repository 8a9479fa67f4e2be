"""Writes the parts of the documentation that quote result files.

    python benchmarks/doc_tables.py                           # after a benchmark wrote its file
    python benchmarks/doc_tables.py --check                   # changes nothing; reports the pages that would change

Each part is written between two comments, `<!-- begin: name (python benchmarks/doc_tables.py) -->` and
`<!-- end -->`. `PARTS` has the names. The script does not need torch.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NAMES = ("index.md", "supported.md", "benchmarks.md", "links.md", "views.md", "integrations.md")
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in NAMES)]
END = "<!-- end -->"
WIDTH = 120


def begin(name: str) -> str:
    return f"<!-- begin: {name} (python benchmarks/doc_tables.py) -->"


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def number(value: float) -> str:
    """Returns the number with two significant digits, or with all digits of its integer part: 0.10, 8.9, 52, 5,245."""
    digits = max(1 - math.floor(math.log10(value)), 0) if value > 0 else 0
    return f"{value:,.{digits}f}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


CALLS = {
    "explicit": "`DTensor.redistribute`",
    "explicit, requires_grad": "with `requires_grad`",
    "explicit, with backward": "and its backward, most of it autograd's own work with DTensors",
    "redistribute_local_tensor": "`redistribute_local_tensor`, which implicit redistributes go through",
    "implicit": "three operators that redistribute implicitly, whole",
}
ONE_COLLECTIVE = "S(0) R R -> R R R"


def overhead() -> list[str]:
    older, newer = (results(f"call_overhead-torch{version}") for version in ("2.11.0", "2.15.0"))
    alone = {row["call"]: row["ours"] for row in newer["rows"] if row["pair"] == ONE_COLLECTIVE}
    rows = []
    for call, text in CALLS.items():
        least, most = newer["summary"][call]["ours_us"]
        ours = f"{number(least)} to {number(most)}"
        if call in ("explicit", "explicit, requires_grad"):
            ours += f"; with one collective {number(alone[call])}"
        rows.append([text, *(number(file["summary"][call]["stock_over_ours"]) for file in (older, newer)), ours])
    return table(["call", "torch 2.11.0", "torch 2.15.0", "ours on 2.15.0, us"], rows)


PLANNED = {
    "mesh 4x4x4, shape 4096x4096": "4x4x4, 4096 x 4096",
    "mesh 4x4x4, shape 4096x4096, with sums": "4x4x4, 4096 x 4096, sums pending too",
    "mesh 8x8x8x64, shape 4096x4096x512": "8x8x8x64 (32,768 ranks), three tensor dims",
    "mesh 8, shape 1048576x64, with sums": "8, 1048576 x 64, sums pending too",
    "mesh 64x8, shape 1048576x64, with sums": "64x8, 1048576 x 64, sums pending too",
    "mesh 512x8, shape 1048576x64, with sums": "512x8, the same tensor, whose 64 columns are cut into 512",
    "mesh 131072x8, shape 1048576x64, with sums": "131072x8 (1,048,576 ranks), the same tensor",
    "look up": "a plan that is in the cache",
}
PLANNERS = ("cpp_us", "python_us", "torch_greedy_us", "torch_dijkstra_us")


def planning() -> list[str]:
    by_name = {row["name"]: row for row in results("planning-torch2.15.0")["rows"]}
    rows = [
        [text, *(number(by_name[name][key]) if key in by_name[name] else "–" for key in PLANNERS)]
        for name, text in PLANNED.items()
    ]
    return table(["mesh, tensor", "C++", "from Python", "PyTorch greedy", "PyTorch Dijkstra"], rows)


def hunt() -> list[str]:
    rows = []
    for row in results("planning_hunt")["rows"]:
        ranks = math.prod(row["mesh"])
        size = f" ({ranks:,} ranks)" if ranks > 10_000 and row["parts"] == "even" else ""
        times = [row[what][which] for what in ("plan_ms", "certificate_ms") for which in ("median", "worst")]
        rows.append([f"{'x'.join(map(str, row['mesh']))}{size}, {row['parts']}", *map(number, times)])
    return table(["mesh, parts", "plan, median", "worst", "certificate, median", "worst"], rows)


def planning_in_short() -> list[str]:
    rows = results("planning_hunt")["rows"]
    pairs = sum(row["pairs"] for row in rows)
    ranks = [math.prod(row["mesh"]) for row in rows]
    plan, certificate = (max(row[what]["worst"] for row in rows) for what in ("plan_ms", "certificate_ms"))
    median = max(row[what]["median"] for row in rows for what in ("plan_ms", "certificate_ms"))
    text = (
        f"- **Planning time**: of {pairs:,} random pairs of layouts on meshes of {min(ranks):,} to {max(ranks):,} "
        f"ranks, the slowest plan took {number(plan)} ms and the slowest certificate {number(certificate)} ms of one "
        f"core. Medians are at most {number(median)} ms on every mesh. Each pair of layouts is planned once."
    )
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def calls_before_and_after() -> list[str]:
    found = results("before_after-torch2.15.0")["call_us_after_over_before"]
    texts = {name: text.partition(",")[0] for name, text in CALLS.items()}
    texts["implicit"] = "operators that redistribute implicitly"
    rows = [[texts[name], *(f"{found[name][key]:.2f}" for key in ("geometric_mean", "worst"))] for name in CALLS]
    return table(["time after over time before", "geometric mean", "worst"], rows)


def plans_before_and_after() -> list[str]:
    found = results("before_after-torch2.15.0")
    rows = []
    for name, figures in found["plan_us_after_over_before"].items():
        text = PLANNED.get(name.removeprefix("plan, ").partition(", stride")[0])
        if text is not None:
            after = figures["median_us_after"]
            rows.append([f"{text}, median", f"{number(after / figures['median_us'])} us", f"{number(after)} us"])
    cached = found["plan_in_the_cache_ns"]
    rows.append([PLANNED["look up"], *(f"{number(cached[when])} ns" for when in ("before", "after"))])
    ends = ("before", "after")
    if "redistributes" in found:
        ratios = [", ".join(map(number, found["redistributes"][f"stock_over_ours_{when}"])) for when in ends]
        rows.append(["redistributes over Gloo, stock / ours, by run", *ratios])
    for product, figures in found.get("products", {}).items():
        ratios = [", ".join(f"{ratio:.2f}" for ratio in figures[f"stock_over_chosen_{when}"]) for when in ends]
        rows.append([f"{product} as chosen, stock / ours, by run", *ratios])
    return table(["", "before", "after"], rows)


def instructions_before_and_after() -> list[str]:
    counts = results("before_after-torch2.15.0")["plan_instructions"]["counts"]
    rows = []
    for name, count in counts.items():
        text = PLANNED.get(name.removeprefix("plan, ").partition(", stride")[0])
        if text is not None:
            millions = (f"{count[when] / 1e6:,.0f}" for when in ("before", "after"))
            rows.append([text, *millions, f"{count['after'] / count['before']:.2f}"])
    return table(["millions of instructions", "before", "after", "after over before"], rows)


def link_of(network: dict[str, Any]) -> str:
    return f"{network['nodes']} x {network['per_node']}, {network['gbit']:g} Gbit/s"


def move_of(row: dict[str, Any]) -> str:
    ends = [f"[{end.replace(' ', ',')}]" for end in row["move"].split(" -> ")]
    return f"`{' -> '.join(ends)}`"


def products_over_links() -> list[str]:
    rows = []
    for network in results("links-torch2.15.0")["networks"]:
        for row in network["products_behind_moves"]:
            if row["rows_k_columns"] != [4096, 1024, 1024]:
                continue
            ms, again = row["ms"], row["again_ms"]
            best = again.get(row["best"], again["chosen"])
            times = [f"{ms[name]:.0f}" for name in ("product", "transfer", "stock", "serial 1")]
            possible = row["hidden_of_possible"]["chosen"]
            hidden = [f"{row['hidden']['chosen']:.2f}", "–" if possible is None else f"{possible:.2f}"]
            chosen = f"{again['chosen']:.0f} ({row['chosen']})"
            rows.append(
                [link_of(network["network"]), row["kind"], *times, chosen, f"{best:.0f} ({row['best']})", *hidden]
            )
    head = ["nodes x ranks, link", "function", "product", "transfer", "stock", "serial", "chosen", "fastest method"]
    return table([*head, "hidden", "of what can be"], rows)


def links_in_short() -> list[str]:
    found = results("links-torch2.15.0")["summary"]
    text = (
        f"Over all {found['rows']} rows, the chosen method is {found['stock_over_chosen_mean']:.2f} times as fast as "
        f"stock and {found['serial_over_chosen_mean']:.2f} times as fast as serial (geometric means). It is within 3% "
        f"of the fastest method in {found['chosen_within_3_percent_of_best']} rows, "
        f"{found['chosen_over_best_worst']:.2f} times as slow at worst, and more than 3% slower than serial in "
        f"{found['chosen_slower_than_serial']}. Of the {found['long_rows']} rows with at least 20 ms of both product "
        f"and transfer, {found['long_rows_of_which_0.9_is_hidden']} hide 90% of the smaller of the two, and "
        f"{found['long_rows_of_which_0.9_of_that_is_hidden']} hide 90% of what can be hidden. Redistributes take stock "
        f"{found['stock_over_ours_mean']:.2f} times as long as ours."
    )
    return textwrap.wrap(text, WIDTH)


def moves_over_links() -> list[str]:
    rows = []
    for network in results("links-torch2.15.0")["networks"]:
        of = network["network"]
        if of["gbit"] != 1:
            continue
        for row in network["redistributes"]:
            ms, rate, predicted = row["ms"], row["ms_at_rate"], row["predicted_ms"]
            times = [f"{ms[way]:.1f}" for way in ("stock", "ours")]
            at_rate = f"{rate['stock']:.1f}, {rate['ours']:.1f}"
            rows.append(
                [f"{of['nodes']} x {of['per_node']}", move_of(row), *times, at_rate, f"{predicted['ours']:.1f}"]
            )
    head = ["nodes x ranks", "move", "stock", "ours", "bytes that left a node, at the rate: stock, ours"]
    return table([*head, "ours, predicted"], rows)


def plans_over_links() -> list[str]:
    rows = []
    for network in results("links-torch2.15.0")["networks"]:
        if network["network"] != {"nodes": 2, "per_node": 2, "gbit": 1}:
            continue
        for row in network["redistributes"]:
            for plan, predicted in row["predicted_ms"].items():
                if plan != "ours":
                    rows.append([move_of(row), plan, f"{predicted:.1f}", f"{row['ms'][plan]:.1f}"])
    return table(["move", "plan", "predicted", "measured"], rows)


STATE_DICTS = {"llama-3.1-8b": "Llama-3.1-8B at 1/8 width", "qwen3-30b-a3b": "Qwen3-30B-A3B at 1/16 width"}
WAYS_OF_STATE_DICTS = {
    "many": "`sw.redistribute_many`",
    "each": "one `sw.redistribute_local` per tensor",
    "broadcast": "one broadcast per tensor",
}


def state_dicts() -> list[str]:
    rows = []
    for row in results("state_dict-torch2.15.0")["rows"]:
        for way, text in WAYS_OF_STATE_DICTS.items():
            model = f"{STATE_DICTS[row['model']]}, {row['tensors']:,} tensors" if way == "many" else ""
            sizes = [round(row[key][way] / 2**20) for key in ("received_bytes_all_ranks", "allocated_peak_worst_rank")]
            messages = f"{row['promised_messages_worst_rank'][way]:,}"
            rows.append([model, text, f"{row['us'][way] / 1e3:,.0f}", *(f"{mib} MiB" for mib in sizes), messages])
    head = ["model", "way", "ms", "received by all ranks", "peak memory", "messages of the worst rank"]
    return table(head, rows)


def state_dicts_over_links() -> list[str]:
    networks = results("state_dict_links-torch2.15.0")["networks"]
    head = ["model", "way"]
    columns = []
    for network in networks:
        head += [f"ms at {network['network']['gbit']:g} Gbit/s", "over the bytes' time"]
        columns.append({row["model"]: row for row in network["rows"]})
    rows = []
    for model, name in STATE_DICTS.items():
        for way, text in WAYS_OF_STATE_DICTS.items():
            cells = [name if way == "many" else "", text]
            for column in columns:
                row = column[model]
                cells += [f"{row['us'][way] / 1e3:,.0f}", f"{row['us'][way] / row['us_at_rate']:.2f}"]
            rows.append(cells)
    return table(head, rows)


def transfers_of_changes() -> list[str]:
    networks = results("changes-torch2.15.0")["networks"]
    rows = []
    for slow, fast in zip(networks[1]["rows"], networks[0]["rows"]):
        wholes = [network["rows"][0] for network in (networks[1], networks[0])]
        received, kept = slow["received_bytes"], slow["kept_bytes_worst_rank"]
        cells = [slow["name"], f"{received / 2**20:.2f} MiB", f"{received / wholes[0]['received_bytes']:.1%}"]
        cells.append(f"{kept / 2**20:.1f} MiB")
        cells += [f"{row['ms'] / whole['ms']:.2f}" for row, whole in zip((slow, fast), wholes)]
        rows.append(cells)
    head = ["sent", "received by both servers", "of everything", "kept by a trainer"]
    return table([*head, "time at 1 Gbit/s, of everything", "time over loopback, of everything"], rows)


STEPS = {
    "compute": "compute alone",
    "communication": "communication alone",
    "possible": "possible",
    "FSDP2": "FSDP2",
    "FSDP2, tuned": "FSDP2 with asynchronous gathers, every prefetch and an all-to-all reduce-scatter",
    "by hand": "pipeline written by hand on PyTorch's collectives",
    "by hand, ours": "pipeline written by hand on our transfers",
    "ours": "`sw.fully_shard`",
    "ours, no prefetch": "`sw.fully_shard` with `Options(prefetch=0)`",
}


def steps_over_links() -> list[str]:
    found = results("fully_shard-torch2.15.0")["rows"]
    times = [row["ms"] | {"possible": row["possible_ms"]} for row in found]
    rows = [[text, *(f"{ms[name]:,.0f}" for ms in times)] for name, text in STEPS.items()]
    return table(["", *(f"{row['tokens']:,} tokens" for row in found)], rows)


def steps_in_short() -> list[str]:
    found = results("fully_shard-torch2.15.0")["rows"]

    def shares(name: str) -> str:
        *others, last = [f"{row['possible_over'][name]:.2f}" for row in found]
        return f"{', '.join(others)} and {last}"

    text = (
        f"So `sw.fully_shard` reaches {shares('ours')} of what is possible, FSDP2 with everything turned on "
        f"{shares('FSDP2, tuned')}, and the pipelines written by hand {shares('by hand')} on PyTorch's collectives and "
        f"{shares('by hand, ours')} on our transfers."
    )
    return textwrap.wrap(text, WIDTH)


def attention_of(file: str, methods: list[str]) -> list[str]:
    rows = []
    for network in results(file)["networks"]:
        for row in network["rows"]:
            ms = row["ms"] | {"chosen": row["ms"]["auto"]}
            times = [f"{ms[name]:,.0f}" if name in ms else "–" for name in ("attention", *methods)]
            rows.append([link_of(network), row["case"]["name"], *times, f"{ms['chosen']:,.0f} ({row['chosen']})"])
    return table(["nodes x ranks, link", "case", "attention", *methods, "chosen"], rows)


def step_overhead() -> list[str]:
    rows = results("step_overhead-torch2.15.0")["rows"]
    clocks = ("thread_ms", "process_ms", "elapsed_ms")
    cells = [[row["name"], *(f"{row[clock]:.0f}" for clock in clocks)] for row in rows]
    return table(["model", "CPU time of the calling thread", "CPU time of a rank", "elapsed time"], cells)


def attention() -> list[str]:
    return attention_of("attention-torch2.15.0", ["serial", "ring", "gather", "ulysses"])


def attention_on_two_levels() -> list[str]:
    return attention_of(
        "attention_two_levels-torch2.15.0", ["stock", "serial", "ring", "gather", "ulysses", "two_level"]
    )


def einsum() -> list[str]:
    rows = []
    for row in results("einsum-torch2.15.0")["rows"]:
        counts = ([str(row[whose][end]) for end in ("free", "moves", "refuses")] for whose in ("stock", "views"))
        raised: collections.Counter[str] = collections.Counter()
        for error, cuts in row["stock"]["errors"].items():
            raised[re.sub(r" '.*'|: split_factor.*", " …", error)] += len(cuts)
        texts = [f"{times} {error}" for error, times in raised.items()]
        rows.append(
            [f"`{row['equation']}`", row["what"], str(row["cases"]), *map(" / ".join, counts), "; ".join(texts) or "–"]
        )
    return table(["equation", "", "cases", "stock 2.15", "`views=True`, 2.15", "what stock raises"], rows)


def times_in_short() -> list[str]:
    """Returns, for each kind of work, the time of the usual way over ours: mean, lowest and highest row."""
    explicit = [row for row in results("call_overhead-torch2.15.0")["rows"] if row["call"] == "explicit"]
    steps = [row["ms"] for row in results("fully_shard-torch2.15.0")["rows"]]
    attention = [row["ms"] for network in results("attention-torch2.15.0")["networks"] for row in network["rows"]]
    found = [
        ("redistributes over Gloo", "stock DTensor", ratios_of("gloo_redistribute-torch2.15.0", "stock", "ours")),
        ("overhead of a call", "stock DTensor", [row["stock"] / row["ours"] for row in explicit]),
        (
            "products with communication",
            "stock DTensor",
            [row["stock_over"]["chosen"] for row in results("gloo_matmul-torch2.15.0")["rows"]],
        ),
        ("many tensors", "one call per tensor", ratios_of("many_tensors-torch2.15.0", "each", "many")),
        ("state dicts", "one broadcast per tensor", ratios_of("state_dict-torch2.15.0", "broadcast", "many")),
        ("expert parallelism", "one row per expert", ratios_of("expert_dispatch-torch2.15.0", "repeated", "ours")),
        (
            "training steps over slow links",
            "FSDP2 with every prefetch",
            [ms["FSDP2, tuned"] / ms["ours"] for ms in steps],
        ),
        (
            "FSDP2's communication",
            "FSDP2's own transfers",
            [row["stock_over_ours"] for n in (2, 4) for row in results(f"fsdp_comm-torch2.15.0-{n}ranks")["rows"]],
        ),
        ("attention over slow links", "no overlap", [ms["serial"] / ms["auto"] for ms in attention]),
    ]
    rows = []
    for section, usual, ratios in found:
        anchor = re.sub(r"[^\w ]", "", section.lower()).replace(" ", "-")
        link = f"[{section}](benchmarks.md#{anchor})"
        values = (statistics.geometric_mean(ratios), min(ratios), max(ratios))
        rows.append(
            [link, usual, str(len(ratios)), *(f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in values)]
        )
    return table(["work", "compared with", "rows", "mean", "lowest", "highest"], rows)


def ratios_of(file: str, usual: str, ours: str) -> list[float]:
    return [row["us"][usual] / row["us"][ours] for row in results(file)["rows"]]


COSTS = ["time, stock / ours", "received, stock / ours", "memory, stock / ours"]


def costs(times: dict[str, float], received: dict[str, float], peak: dict[str, float]) -> list[str]:
    """Returns the cells below `COSTS`, from milliseconds and bytes of both contenders."""
    sizes = [[number(count[way] / 2**20) for way in ("stock", "ours")] for count in (received, peak)]
    return [f"{times['stock']:,.0f} / {times['ours']:,.0f} ms", *(f"{stock} / {ours} MiB" for stock, ours in sizes)]


def transformers_rows() -> dict[str, list[str]]:
    """Returns by case: what you change, our calls, and costs."""
    rows = {}
    for row in results("transformers-torch2.15.0")["rows"]:
        calls = ", ".join(f"{count} {name}" for name, count in row["ours"]["our_calls"].items())
        both = [{way: row[way][key] for way in ("stock", "ours")} for key in ("ms", "received_bytes", "peak_bytes")]
        rows[row["case"]] = [row["change"], calls or "–", *costs(*both)]
    return rows


def transformers() -> list[str]:
    head = ["what", "what you change", "our calls", *COSTS]
    return table(head, [[case, *cells] for case, cells in transformers_rows().items()])


def torchtitan_rows() -> dict[str, list[str]]:
    """Returns by case: our calls in a step, and costs of a step."""
    rows = {}
    for row in results("torchtitan-torch2.15.0")["torchtitan"]:
        dispatches = f", {row['dispatches_per_step']} dispatches" if row["dispatches_per_step"] else ""
        times = {way: 1000 * seconds for way, seconds in row["seconds"].items()}
        cells = costs(times, row["received_bytes"], row["peak_bytes"])
        rows[row["case"]] = [f"{row['calls_per_step']} calls{dispatches}", *cells]
    return rows


def torchtitan() -> list[str]:
    rows = [[case, *cells] for case, cells in torchtitan_rows().items()]
    for cells, row in zip(rows, results("torchtitan-torch2.15.0")["torchtitan"]):
        cells += [number(row["cpu_seconds_ratio"]), f"{row['largest_loss_difference']:.0e}"]
    return table(["model", "our calls in a step", *COSTS, "CPU time, of stock's", "largest difference of losses"], rows)


def clients_in_short() -> list[str]:
    titan, hugging = torchtitan_rows(), transformers_rows()
    shown = {
        "step, FSDP 4": "transformers 5.24: a step, FSDP over 4",
        "step, TP 4, over the sequence": "a step, tensor parallelism over 4, sharded sequence",
        "saving, FSDP 2 x TP 2": "saving, FSDP 2 x TP 2",
    }
    flags = "`--module shardwright.integrations.torchtitan.{} --training.disable_cuda_graphs`"
    llama, qwen = flags.format("llama3"), flags.format("qwen3")
    rows = [
        ["torchtitan 0.3: a step, weights sharded over 4", llama, *titan["Llama 3, sharded weights"]],
        ["a step, sharded over 2 x tensor parallelism over 2", llama, *titan["Llama 3, 2 x 2"]],
        ["a step of a model with experts, over 2", qwen, *titan["Qwen3 MoE, experts over 2"]],
        *([name, *hugging[case]] for case, name in shown.items()),
    ]
    return table(["what you run", "what you change", "our calls", *COSTS], rows)


PARTS: dict[str, Callable[[], list[str]]] = {
    "times in short": times_in_short,
    "products over links": products_over_links,
    "links in short": links_in_short,
    "moves over links": moves_over_links,
    "plans over links": plans_over_links,
    "state dicts": state_dicts,
    "state dicts over links": state_dicts_over_links,
    "transfers of changes": transfers_of_changes,
    "steps over links": steps_over_links,
    "steps in short": steps_in_short,
    "step overhead": step_overhead,
    "attention over links": attention,
    "attention on two levels": attention_on_two_levels,
    "einsum": einsum,
    "transformers": transformers,
    "torchtitan": torchtitan,
    "clients in short": clients_in_short,
    "overhead": overhead,
    "planning": planning,
    "planning on four meshes": hunt,
    "planning in short": planning_in_short,
    "calls before and after": calls_before_and_after,
    "plans before and after": plans_before_and_after,
    "instructions before and after": instructions_before_and_after,
}


def with_parts(page: str) -> str:
    """Returns the page with each of its parts written anew from the results."""
    for name, write in PARTS.items():
        before, mark, rest = page.partition(begin(name))
        if not mark:
            continue
        apart = [] if name == "planning in short" else [""]  # this part is a list item
        lines = [before + mark, *apart, *write(), *apart, END]
        page = "\n".join(lines) + rest.partition(END)[2]
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page would change")
    options = parser.parse_args()
    differ = []
    for path in PAGES:
        page = path.read_text()
        written = with_parts(page)
        if written == page:
            continue
        differ.append(path)
        if not options.check:
            path.write_text(written)
    for path in differ:
        print(f"{path.relative_to(ROOT)}: {'differs from its results' if options.check else 'written'}")
    return 1 if differ and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
