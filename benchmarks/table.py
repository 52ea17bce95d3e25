"""Write the newest of ``benchmarks/results`` into docs/explanation/speed.md: ``python -m benchmarks.table``."""

import json
from pathlib import Path
from typing import Any

from benchmarks.timing import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "speed.md"
PEERS = ("timm", "transformers", "torchvision", "vit-pytorch")
PASSES = {"forward": "forward", "both": "forward and backward"}


def newest(name: str) -> dict[str, Any]:
    return json.loads(max(RESULTS.glob(f"{name}-*.json")).read_text())


def forward_table() -> str:
    result = newest("forward")
    machine = result["machine"]
    lines = [
        f"Eager float32 on {machine['threads']} cores ({machine['cpu']}), torch {machine['versions']['torch']}, "
        f"{machine['date']}: time of a peer divided by ours, so above 1 we are faster. Median of five runs, each the "
        "ratio of the fastest turns; A/A is our model against itself. Same weights and inputs, outputs compared first.",
        "",
        f"| network | batch | ours, ms | {' | '.join(PEERS)} | A/A |",
        "|---|---|---|" + "---|" * (len(PEERS) + 1),
    ]
    for row in sorted(result["rows"], key=lambda row: (row["pass"] != "forward", "b16" in row["model"], row["batch"])):
        peers = " | ".join(f"{row['peers'][peer]:.2f}" for peer in PEERS)
        case = f"{row['model']}, {PASSES[row['pass']]}"
        lines.append(f"| {case} | {row['batch']} | {row['milliseconds']:.0f} | {peers} | {row['a_a']:.2f} |")
    shares = [row["matmul_share"] for row in result["rows"] if row["matmul_share"]]
    lines += ["", f"The bare matrix products take {min(shares):.0%} to {max(shares):.0%} of our forward pass."]
    return "\n".join(lines)


def mixed_table() -> str:
    result = newest("mixed_sizes")
    about, *rows = result["rows"]
    sizes = {tuple(size) for size in about["sizes"]}
    lines = [
        f"{len(about['sizes'])} photos of {len(sizes)} sizes in one call ({about['model']}, "
        f"{result['machine']['date']}), images per second:",
        "",
        "| pass | packed (ours) | padded with a mask | timm NaFlex | one by one |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        rates = row["images_per_second"]
        cells = [f"**{rates['packed']:.1f}**", *(f"{rates[way]:.1f}" for way in ("padded", "NaFlex", "one by one"))]
        lines.append(f"| {PASSES[row['pass']]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def merging_table() -> str:
    if not any(RESULTS.glob("merging-*.json")):
        return ""
    result = newest("merging")
    lines = [about(result)]
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["model"], row["batch"]) == (model, batch)]
        name = Path(model).name
        lines += [
            "",
            f"{name}, batch {batch}, {rows[0]['images']:,} test images. The speed is relative to "
            f"{rows[0]['relative_to']} in eager float32, and the loss of top-1 to merge 0 in float32, with its 95% "
            "interval from paired images:",
            "",
            "| merge | precision | tokens left | operations | speed | top-1 | points lost | same label |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['merge']} | {row['precision']} | {row['tokens_left']} | {row['operations']:.0%} | "
            f"{row['speed']:.2f} x | {row['top1']:.2%} | "
            f"{row['drop']:.2f} ({row['drop_interval'][0]:.2f} to {row['drop_interval'][1]:.2f}) | "
            f"{row['agreement']:.1%} |"
            for row in rows
        ]
    return "\n".join([*lines, ""])


def engines_table() -> str:
    if not any(RESULTS.glob("engines-*.json")):
        return ""
    result = newest("engines")
    lines = [
        f"{about(result)} The table has the speed of random weights relative to timm in eager float32, in the median "
        f"of {len(next(iter(result['rows'][0]['runs'].values())))} runs. A/A is timm against itself; auto is what "
        "vitral chooses for a long run.",
        "",
    ]
    rows = sorted(result["rows"], key=lambda row: ("b16" in row["model"], row["batch"]))
    titles = list(dict.fromkeys(title for row in rows for title in row["ratios"]))
    heads = [f"{row['model']}, batch {row['batch']}" for row in rows]
    lines += [f"| engine | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    lines.append(f"| timm, ms | {' | '.join(format(row['timm_milliseconds'], '.0f') for row in rows)} |")
    for title in titles:
        if title != "timm float32":
            cells = [f"{row['ratios'][title]:.2f}" if title in row["ratios"] else "" for row in rows]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    lines.append(f"| auto chose | {' | '.join(row['auto'] for row in rows)} |")
    return "\n".join([*lines, ""])


def folder_table() -> str:
    if not any(RESULTS.glob("predict-folder-*.json")):
        return ""
    result = newest("predict-folder")
    rows = result["rows"]
    lines = [f"{about(result)} {rows[0]['images']} photos of a folder, in images per second, and relative to timm:", ""]
    lines += [f"| engine | {' | '.join(row['model'] for row in rows)} |", f"|---{'|---' * len(rows)}|"]
    for title in rows[0]["ratios"]:
        cells = [f"{row['images_per_second'][title]:.1f}{relative(row['ratios'][title])}" for row in rows]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines += ["", "From a new process to the label of one photo, in seconds:", ""]
    lines += [f"| engine | {' | '.join(row['model'] for row in rows)} |", f"|---{'|---' * len(rows)}|"]
    for title in rows[0]["cold_start_seconds"]:
        lines.append(f"| {title} | {' | '.join(format(row['cold_start_seconds'][title], '.2f') for row in rows)} |")
    return "\n".join([*lines, ""])


def decoding_table() -> str:
    if not any(RESULTS.glob("decoding-*.json")):
        return ""
    result = newest("decoding")
    titles = list(result["rows"][0]["images_per_second"])
    lines = [f"{about(result)} Images per second:", ""]
    lines += [f"| photos, engine | {' | '.join(titles)} |", f"|---{'|---' * len(titles)}|"]
    for row in result["rows"]:
        cells = [format(row["images_per_second"][title], ".0f") for title in titles]
        lines.append(f"| {row['side']} pixels, {row['engine']} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def cost_table() -> str:
    if not any(RESULTS.glob("cost-*.json")):
        return ""
    result = newest("cost")
    curves = [row for row in result["rows"] if row["what"] != "limit"]
    limits = [row for row in result["rows"] if row["what"] == "limit"]
    lines = [
        f"{about(result)} Milliseconds of a forward pass of {curves[0]['model']}, and the exponent k of time ~ x^k:",
        "",
        "| x | values | | milliseconds | k |",
        "|---|---|---|---|---|",
    ]
    for row in curves:
        for group, times in row["milliseconds"].items():
            exponent = row["exponents"][group]
            shown = ", ".join(f"{value:.0f}" for value in times)
            values = ", ".join(map(str, row["x"]))
            lines.append(f"| {row['what']} | {values} | {group} | {shown} | {exponent:.2f} |")
    lines += [
        "",
        "The limit is the speed of the fastest product of large matrices, in torch or OpenVINO. Batches of "
        f"{limits[0]['batch']} images:",
        "",
        "| engine | billion operations per second | limit | share |",
        "|---|---|---|---|",
    ]
    for row in limits:
        cells = f"{row['gigaflops']:.0f} | {row['limit_gigaflops']:.0f} | {row['share']:.0%}"
        lines.append(f"| {row['engine']} | {cells} |")
    return "\n".join([*lines, ""])


def losses_list() -> str:
    """Return a sentence about each row of the newest results in which a peer is faster than vitral."""
    lines = []
    for row in newest("forward")["rows"]:
        if row["ratio"] < 1:
            case = f"{row['model']}, {PASSES[row['pass']]}, batch {row['batch']}"
            lines.append(
                f"- {case}: {row['fastest_peer']} takes {row['ratio']:.2f} times as long as eager torch in vitral."
            )
    for row in newest("train_step")["rows"]:
        if row["ratio"]["default"] < 1:
            lines.append(
                f"- a training step of {row['model']}: timm takes {row['ratio']['default']:.2f} times as long."
            )
    if any(RESULTS.glob("engines-*.json")):
        for row in newest("engines")["rows"]:
            ratios = {title: ratio for title, ratio in row["ratios"].items() if "int8" not in title}
            best = max(ratios, key=lambda title: ratios[title])
            if ratios["auto"] < 0.92 * ratios[best]:
                share = ratios["auto"] / ratios[best]
                lines.append(f"- {row['model']}, batch {row['batch']}: auto reaches {share:.2f} of {best}.")
    return "\n".join([*lines, ""]) if lines else "Nowhere in the newest results.\n"


def training_table() -> str:
    result = newest("train_step")
    rows = result["rows"]
    titles = list(rows[0]["ratio"])
    lines = [
        f"{about(result)} timm's time divided by ours:",
        "",
        f"| model | batch | timm, ms | {' | '.join(titles)} | 200 steps, compiled |",
        f"|---{'|---' * (len(titles) + 3)}|",
    ]
    for row in rows:
        whole = row.get("ratio_of_200_steps", {}).get("compiled")
        cells = [f"{row['ratio'][title]:.2f}" for title in titles] + ["" if whole is None else f"{whole:.2f}"]
        lines.append(f"| {row['model']} | {row['batch']} | {row['milliseconds']['timm']:.0f} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def relative(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.2f} x)"


def about(result: dict[str, Any]) -> str:
    """Return a sentence about the machine of a result."""
    machine = result["machine"]
    instructions = " ".join(machine.get("instructions", ())) or machine["capability"]
    versions = "; ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{machine['date']}, {machine['cpu']}, {machine['threads']} threads ({instructions}); {versions}."


def serve_table() -> str:
    if not any(RESULTS.glob("serve-*.json")):
        return ""
    result = newest("serve")
    machine, rows = result["machine"], result["rows"]
    versions = "; ".join(f"{name} {machine['versions'][name]}" for name in ("transformers", "litserve", "timm"))
    lines = [
        f"{machine['date']}, S/16 at 224 px from JPEG photos, {rows[0]['clients']} clients in a process of their own; "
        f"{machine['threads']} cores ({machine['cpu']}); {versions}. Medians of {rows[0]['rounds']} rounds:",
        "",
        "| server | images/s | of the engine alone | p50, ms | p99, ms |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: -row["rate"]):
        ratio = f"{row['of_engine']:.2f}" if row.get("of_engine") else ""
        times = [f"{1000 * row[name]:.0f}" if row[name] else "" for name in ("p50", "p99")]
        lines.append(f"| {row['server']} | {row['rate']:.1f} | {ratio} | {' | '.join(times)} |")
    return "\n".join([*lines, ""])


def renew_page(text: str) -> str:
    """Return the page with the newest tables between its markers."""
    tables = {
        "results": f"{forward_table()}\n\n{mixed_table()}\n",
        "merging": f"\n{merging_table()}",
        "engines": f"\n{engines_table()}",
        "folders": f"\n{folder_table()}",
        "decoding": f"\n{decoding_table()}",
        "training": f"\n{training_table()}",
        "serve": f"\n{serve_table()}",
        "cost": f"\n{cost_table()}",
        "losses": f"\n{losses_list()}",
    }
    for name, table in tables.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, after = text.split(start)[0], text.split(end)[1]
        text = f"{before}{start}\n{table}{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(renew_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
