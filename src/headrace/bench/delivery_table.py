"""Formats the figures of the delivery benchmark as lines of text."""

from __future__ import annotations

from typing import Any

_COLUMNS = ("", "MB", "acked", "lost", "copies", "stage", "fetch", "swap", "canary", "GB/s", "of a copy")


def table(found: dict[str, Any]) -> list[str]:
    """Return one line for each row, and after them the figures that only some rows have."""
    threads = "one thread" if found["threads"] == 1 else f"{found['threads']} threads"
    if found["device"] == "cpu":
        threads += (
            f" in each process and for plain copies, {found['sharing_threads']} for those of a delivery and digests"
        )
    else:
        threads += " in each process"
    decoding = found["arguments"]["decode"]
    doing = f", each decoding {decoding} sequences" if decoding else ""
    lines = [
        f"{found['model']}, {found['dtype']}, {found['device']} ({found['device_name']}), torch {found['torch']}",
        f"{found['engines']} engine(s){doing}; {threads}",
        f"milliseconds are medians over {found['arguments']['versions']} versions, digests included, canary apart",
        "acked: from the publish until every engine has proved it; lost: of the trainer's time, and how many copies of"
        " what is sent that is; fetch: a part of stage",
        "",
    ]
    lines += _aligned([_COLUMNS, *(_cells(row) for row in found["rows"])])
    lines.append("")
    for kind, proof in found["proof"].items():
        lines.append(
            f"digest of {kind}: {_ms(proof['digest_seconds'])} ms for {proof['tensors']} tensors, "
            f"{proof['digest_over_copy']:.2f}x a copy by as many threads{_on_all_cores(proof)}"
        )
    for row in found["rows"]:
        lines += [f"{_name(row)}: {text}" for text in _remarks(row)]
    return lines


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    names = ("acknowledged", "trainer_lost", "stage", "fetch", "swap", "canary")
    times = [_ms(row[f"{name}_seconds"]["median"]) for name in names]
    times.insert(2, f"{row['trainer_lost_over_copy']:.2f}")
    rates = (f"{row['gb_per_second']:.2f}", f"{row['ratio_to_copy']:.3f}")
    return (_name(row), f"{row['bytes_on_the_wire'] / 1e6:,.1f}", *times, *rates)


def _remarks(row: dict[str, Any]) -> list[str]:
    found = []
    if row["wire_over_weights"] < 1:
        found.append(f"1/{1 / row['wire_over_weights']:.0f} of the weights' bytes are sent")
    if row["sent"] != [row["send"]]:
        found.append(f"versions went as {' and '.join(row['sent'])}")
    if "ratio_to_socket" in row:
        found.append(
            f"a bare loopback socket gives {row['socket_gb_per_second']:.2f} GB/s: fetching has "
            f"{row['fetch_ratio_to_socket']:.2f} of it, the whole delivery {row['ratio_to_socket']:.2f}"
        )
    if "step_seconds" in row:
        found.append(
            f"first token of the new version {_ms(row['first_token_seconds']['median'])} ms after the publish began, "
            f"{_ms(row['first_token_beyond_a_step_seconds'])} ms beyond one step of {_ms(row['step_seconds'])} ms"
        )
        legs = [(name, value) for name, value in row.items() if name.startswith("leg_")]
        spent = (f"{name[4:-8].replace('_', ' ')} {_ms(value['median'])}" for name, value in legs)
        found.append(f"of it, ms: {', '.join(spent)}")
    return found


def _on_all_cores(proof: dict[str, Any]) -> str:
    return (
        f"; {_ms(proof['all_cores_digest_seconds'])} ms as it is taken" if "all_cores_digest_seconds" in proof else ""
    )


def _name(row: dict[str, Any]) -> str:
    return f"{row['transport']}, {row['send']}{', per parameter' if row['per_parameter'] else ''}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds >= 0.01 else f"{1e3 * seconds:.2f}"


def _aligned(cells: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
