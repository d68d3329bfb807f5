"""An evidence pack: a page, numbers, digests of weights and data, and a report for the build.

index.html     the limits and what came out, the worst pictures, the cuts, groups, protocol
gate.json      the same for programs, with command, versions and digests
audit.csv      one line for each picture
pictures.csv   SHA-256 of each picture as the model saw it
junit.xml      one test case for each limit, as build servers read it
SHA256SUMS     of all files above: `sha256sum -c SHA256SUMS`

`manifest.json`, the list of all files that every result has, is written last and has no sum.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from seecause._files import digest_file, write_atomic, write_json
from seecause.background._gate import Gate
from seecause.models.base import ImageModel, library_versions
from seecause.report.folder import rows_csv
from seecause.report.page import Section, table, title_name, verdict_box, write_page
from seecause.report.repair import audit_csv, audit_sections

SUMS = "SHA256SUMS"
DIGESTS_NOTE = "The model and the pictures that these numbers hold for, and no others."


def write_pack(
    folder: Path, model: ImageModel, result: Gate, *, command: str, files: dict[str, str], lead: str
) -> None:
    """Fill an empty folder. `files`: digests of the files that the weights came from."""
    record = facts(model, result, command=command, files=files)
    sections = [limits_section(result), *audit_sections(model, result.audit)]
    sections.insert(-1, digests_section(record))
    write_page(folder / "index.html", f"May {title_name(model.name)} ship?", sections, lead=lead)
    write_json(folder / "gate.json", record)
    write_atomic(folder / "audit.csv", audit_csv(result.audit, model.classes))
    write_atomic(folder / "pictures.csv", pictures_csv(result))
    write_atomic(folder / "junit.xml", junit_xml(result, model.name))
    written = sorted(path for path in folder.iterdir() if path.is_file())
    sums = "".join(f"{digest_file(path)}  {path.name}\n" for path in written)
    write_atomic(folder / SUMS, sums)


def facts(
    model: ImageModel, result: Gate, *, command: str, files: dict[str, str]
) -> dict[str, Any]:
    """What is filed, for programs."""
    audit = result.audit
    return {
        "passed": result.passed,
        "sentence": result.sentence,
        "checks": [
            {
                "name": check.name,
                "meaning": check.meaning,
                "limit": f"{check.bound} {check.limit:g}",
                "value": check.value,
                "interval 95%": list(check.interval),
                "judged by": f"the {check.end} end of the interval",
                "outcome": check.outcome,
                "sentence": check.sentence,
            }
            for check in result.checks
        ],
        "verdict": audit.verdict,
        "numbers": audit.numbers(),
        "digests": {
            "weights": weights_digest(model),
            "weights files": files,
            "data": audit.pictures.name,
            "pictures": len(audit.pictures),
            "left out": [asdict(hole) for hole in audit.pictures.holes],
            "pictures.csv": hashlib.sha256(pictures_csv(result).encode()).hexdigest(),
        },
        "command": command,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": library_versions(),
        "platform": platform.platform(),
        "run": audit.protocol,
    }


def weights_digest(model: ImageModel) -> str:
    """SHA-256 of all weights and buffers, by name, whatever file they came from."""
    total = hashlib.sha256()
    modules = [model.module] if model.extra is None else [model.module, model.extra]
    for module in modules:
        for name, tensor in sorted(module.state_dict().items()):
            if isinstance(tensor, torch.Tensor):
                total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                plain = tensor.detach().cpu().contiguous().flatten()
                total.update(plain.view(torch.uint8).numpy().data)
    return total.hexdigest()


def pictures_csv(result: Gate) -> str:
    """Name and digest of each picture as the model saw it: normalised pixels."""
    rows = []
    pictures = result.audit.pictures
    for name, image in zip(pictures.ids, pictures.images, strict=True):
        pixels = image.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        rows.append({"picture": name, "sha256": hashlib.sha256(pixels.data).hexdigest()})
    return rows_csv(rows)


def limits_section(result: Gate) -> Section:
    """What was asked and what came out, one row a limit."""
    head = ("", "limit", "measured", "95 % interval", "judged by", "outcome")
    rows = []
    for check in result.checks:
        low, high = check.interval
        interval = f"{low:.3f} to {high:.3f}"
        limit, end = f"{check.bound} {check.limit:g}", f"{check.end} end"
        rows.append((check.name, limit, f"{check.value:.3f}", interval, end, check.outcome))
    reasons = [check.sentence for check in result.checks if check.outcome != "pass"]
    terms = {check.name: check.meaning for check in result.checks}
    body = verdict_box([result.sentence, *reasons]) + table(rows, head=head)
    return Section("May it ship?", body, "", terms, short="Limits")


def digests_section(record: dict[str, Any]) -> Section:
    """Which weights and which pictures, and how to do it again."""
    digests = record["digests"]
    rows = [("weights", digests["weights"])]
    rows += [(f"file {name}", value) for name, value in digests["weights files"].items()]
    rows += [(f"{digests['pictures']} pictures of {digests['data']}", digests["pictures.csv"])]
    rows += [("command", record["command"]), ("when", record["when"])]
    return Section("What was tested?", table(rows), DIGESTS_NOTE)


def junit_xml(result: Gate, model: str) -> str:
    """One test case for each limit."""
    failed = [check for check in result.checks if check.outcome != "pass"]
    counts = {"tests": str(len(result.checks)), "failures": str(len(failed)), "errors": "0"}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "seecause gate", **counts})
    for check in result.checks:
        name = f"{check.name} {check.bound} {check.limit:g}"
        case = ElementTree.SubElement(suite, "testcase", {"classname": model, "name": name})
        if check.outcome != "pass":
            failure = {"type": check.outcome, "message": check.sentence}
            ElementTree.SubElement(case, "failure", failure).text = check.meaning
        ElementTree.SubElement(case, "system-out").text = check.sentence
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
