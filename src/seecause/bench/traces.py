"""Head attribution of one question over a dataset, in pieces that survive a power cut.

    manifest.json                   what was asked last
    samples/ID.heads.*              one sample's heads and text rows; ID is a digest of everything
    that decides them
    samples/ID.tokens.*             its image tokens, given the text rows that the whole dataset
    keeps

A piece is a safetensors file and, written last, a JSON file: where that is, the piece is finished,
and the same command again reads it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from seecause import __version__
from seecause._files import write_atomic
from seecause.data.dataset import Dataset, Sample
from seecause.data.images import to_pil
from seecause.errors import BadImage, BadOption, BadPrompt, BankMismatch, DataMissing, WeakAnswer
from seecause.lvlm import (
    LVLM,
    MaskEngine,
    MeanBank,
    object_share,
    seen_mask,
    text_effects,
    trace_heads,
    trace_tokens,
)
from seecause.lvlm.bank import picture_digest
from seecause.lvlm.fit import Sampling, check_sampling
from seecause.lvlm.trace import RANKINGS, HeadTrace, TokenTrace, rows_of

COMMAND = "lvlm study"
SKIPPED = (
    WeakAnswer,
    BankMismatch,
    BadPrompt,
    BadImage,
    DataMissing,
)  # what one sample may do; anything else stops the study
Piece = tuple[
    dict[str, Any], dict[str, Tensor], str | None
]  # numbers and tensors, or why there are none


@dataclass(frozen=True)
class Asked:
    """What decides every piece, samples apart."""

    question: str
    masks: int = 10_000
    token_masks: int = 10_000  # 0: heads and text rows only
    p: float = 0.75
    floor: float | None = 1.0  # None: see MaskEngine
    right_only: bool = False  # samples whose answer is not their class are left out
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Traced:
    """One sample: numbers and tensors, or why there are none. Where only its image tokens are
    missing, `untold` says why."""

    index: int
    id: str
    label: str | None
    numbers: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    skipped: str | None = None
    untold: str | None = None

    @property
    def hole(self) -> str | None:
        return self.skipped or (self.untold and f"no image tokens: {self.untold}")


@dataclass(frozen=True, eq=False)
class Study:
    samples: list[Traced]
    text: Tensor | None  # u* of the dataset, [T]
    pieces: tuple[str, ...]  # the text rows

    @property
    def known(self) -> list[Traced]:
        return [sample for sample in self.samples if sample.skipped is None]

    def stacked(self, name: str) -> Tensor:
        """One tensor of all samples that have it, [S, ...]."""
        return torch.stack(
            [sample.tensors[name] for sample in self.known if name in sample.tensors]
        )

    def column(self, name: str) -> Tensor:
        """One number of all samples that have it, [S] float64."""
        return torch.tensor(
            [sample.numbers[name] for sample in self.known if sample.numbers.get(name) is not None],
            dtype=torch.float64,
        )


def run_study(
    lvlm: LVLM,
    bank: MeanBank,
    data: Dataset,
    asked: Asked,
    folder: Path,
    *,
    advance: Callable[[int], None] = lambda done: None,
) -> Study:
    """Every sample's heads and text rows, then, given the rows kept by the dataset's mean, its
    image tokens. `advance` hears of every piece."""
    _prepare(folder, lvlm, data, asked)
    found = []
    for index in range(len(data)):
        found.append(_heads(lvlm, bank, data, index, asked, folder))
        advance(1)
    study = Study(found, *_dataset_rows(found))
    if not asked.token_masks or study.text is None:
        return study
    whole = []
    for sample in found:
        whole.append(
            sample
            if sample.skipped is not None
            else _tokens(lvlm, bank, data, sample, study.text, asked, folder)
        )
        advance(1)
    return Study(whole, study.text, study.pieces)


def seed_of(name: str, seed: int = 0) -> int:
    """A seed of its own for every sample: shared masks would correlate their errors."""
    return int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:10], 16)


def to_csv(study: Study) -> str:
    """One line a sample, holes with their reason."""
    names = list(
        dict.fromkeys(name for sample in study.known for name in sample.numbers if name != "pieces")
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sample", "label", *names, "missing"])
    for sample in study.samples:
        writer.writerow(
            [
                sample.id,
                sample.label or "",
                *(_cell(sample.numbers.get(name)) for name in names),
                sample.hole or "",
            ]
        )
    return text.getvalue()


def head_numbers(engine: MaskEngine, found: HeadTrace) -> dict[str, Any]:
    """What a table says about one sample's heads."""
    counts = {
        f"{kind}_{name}": count
        for name, pair in found.counts().items()
        for kind, count in zip(("enough", "needed"), pair, strict=True)
    }
    fit = found.heads
    return {
        "answer": engine.answer,
        "span": engine.span,
        "r2": fit.r2,
        "pearson": fit.pearson,
        "split_half": fit.agreement,
        **counts,
    }


def token_numbers(found: TokenTrace, mask: Tensor | None) -> dict[str, Any]:
    """And about its image tokens; with the object's mask in their frame (`seen_mask`), how much
    lies on the object. None: nothing positive to share out."""
    numbers: dict[str, Any] = {
        "sufficiency": found.sufficiency, "token_r2": found.tokens.r2,
        "token_split_half": found.tokens.agreement, "token_attention": found.agreement,
    }  # fmt: skip
    if mask is not None:
        gamma, weighted = (
            object_share(values, found.tokens.tokens, mask)
            for values in (found.tokens.coefficients, found.weighted)
        )
        on_object = (
            (None, None, None) if gamma is None else (gamma.share, gamma.area, float(gamma.hit))
        )
        numbers |= dict(zip(("object_share", "object_area", "object_hit"), on_object, strict=True))
        numbers["weighted_object_share"] = None if weighted is None else weighted.share
    return numbers


def _heads(
    lvlm: LVLM, bank: MeanBank, data: Dataset, index: int, asked: Asked, folder: Path
) -> Traced:
    try:
        sample = data[index]
    except SKIPPED as reason:
        return Traced(index, str(index), None, skipped=_reason(reason))
    label = data.classes[sample.label] if sample.label is not None and data.classes else None
    start = Traced(index, sample.id or str(index), label)
    file = (
        folder
        / "samples"
        / f"{_key(lvlm, bank, sample, label, replace(asked, token_masks=0))}.heads"
    )

    def make() -> Piece:
        engine = _engine(lvlm, bank, sample, asked)
        check_sizes(engine, asked.masks, asked.token_masks)
        right = (
            None
            if label is None
            else engine.target == lvlm.answer_ids(to_pil(sample.image), asked.question, label)[0]
        )
        if asked.right_only and not right:
            return (
                {},
                {},
                f"answers {engine.answer!r}"
                + (", not the class" if label is None else f", not {label!r}"),
            )
        heads = trace_heads(
            engine, masks=asked.masks, p=asked.p, seed=seed_of(start.id, asked.seed)
        )
        effects = text_effects(engine, heads.chosen)
        tensors = {
            "coefficients": heads.heads.coefficients, "attention": heads.attention,
            "causal": heads.causal, "chosen": heads.chosen, "deltas": effects.deltas,
            **{f"{kind}.{name}": getattr(heads.curves[name],
            kind).mean(dim=0) for name in RANKINGS for kind in ("faithfulness", "completeness")},
        }  # fmt: skip
        return (
            {**head_numbers(engine, heads), "right": right, "pieces": list(effects.pieces)},
            tensors,
            None,
        )

    numbers, tensors, skipped = _piece(file, make)
    return replace(start, numbers=numbers, tensors=tensors, skipped=skipped)


def _tokens(
    lvlm: LVLM,
    bank: MeanBank,
    data: Dataset,
    known: Traced,
    text: Tensor,
    asked: Asked,
    folder: Path,
) -> Traced:
    try:
        sample = data[known.index]
    except SKIPPED as reason:
        return replace(known, untold=_reason(reason))
    file = (
        folder
        / "samples"
        / f"{_key(lvlm, bank, sample, known.label, asked, rows=text.int().tolist())}.tokens"
    )

    def make() -> Piece:
        engine = _engine(lvlm, bank, sample, asked)
        seed = seed_of(known.id, asked.seed)
        found = trace_tokens(
            engine,
            known.tensors["coefficients"],
            known.tensors["chosen"],
            text=text,
            masks=asked.token_masks,
            p=asked.p,
            seed=seed,
        )
        mask = None if sample.mask is None else seen_mask(lvlm, engine.prompt, sample.mask)
        return (
            token_numbers(found, mask),
            {"gamma": found.tokens.coefficients, "weighted": found.weighted},
            None,
        )

    numbers, tensors, untold = _piece(file, make)
    return replace(
        known, numbers=known.numbers | numbers, tensors=known.tensors | tensors, untold=untold
    )


def _piece(file: Path, make: Callable[[], Piece]) -> Piece:
    """Read a finished piece, or make and keep it. What cannot be made stays as a hole with its
    reason."""
    mark, values = file.with_name(file.name + ".json"), file.with_name(file.name + ".safetensors")
    if not mark.is_file():
        try:
            numbers, tensors, skipped = make()
        except SKIPPED as reason:
            numbers, tensors, skipped = {}, {}, _reason(reason)
        write_atomic(
            values, save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
        )
        write_atomic(mark, (json.dumps({"numbers": numbers, "skipped": skipped}) + "\n").encode())
    read = json.loads(mark.read_text(encoding="utf-8"))
    return read["numbers"], load_file(values), read["skipped"]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())


def check_sizes(engine: MaskEngine, masks: int, token_masks: int = 0, *, seed: int = 0) -> None:
    """Refuse too few masks for the heads or the image tokens (0: none are fitted) before any are
    asked."""
    check_sampling(Sampling(masks, seed=seed), engine.n_components)
    if token_masks:
        check_sampling(Sampling(token_masks, seed=seed), engine.n_image)


def _dataset_rows(samples: Sequence[Traced]) -> tuple[Tensor | None, tuple[str, ...]]:
    """u* by the mean effect over the dataset, and the pieces of the text rows."""
    known = [sample for sample in samples if sample.skipped is None]
    if not known:
        return None, ()
    return rows_of(torch.stack([sample.tensors["deltas"] for sample in known]).mean(dim=0)), tuple(
        known[0].numbers["pieces"]
    )


def _engine(lvlm: LVLM, bank: MeanBank, sample: Sample, asked: Asked) -> MaskEngine:
    return MaskEngine(lvlm, to_pil(sample.image), asked.question, bank, floor=asked.floor)


def _key(
    lvlm: LVLM, bank: MeanBank, sample: Sample, label: str | None, asked: Asked, **more: Any
) -> str:
    """A digest of everything that decides a piece."""
    calibration = [bank.mode, bank.size, *bank.digests]
    where = [lvlm.device.type, str(lvlm.dtype), torch.__version__, __version__]
    decides = [
        lvlm.fingerprint(),
        calibration,
        picture_digest(to_pil(sample.image)),
        sample.id,
        label,
        asdict(asked),
        where,
        more,
    ]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:20]


def _prepare(folder: Path, lvlm: LVLM, data: Dataset, asked: Asked) -> None:
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    record: Mapping[str, Any] = {
        "command": COMMAND,
        "model": lvlm.name,
        "data": data.name,
        "samples": len(data),
        **asdict(asked),
    }
    write_atomic(folder / "manifest.json", (json.dumps(record, indent=2) + "\n").encode())


def check_folder(folder: Path) -> None:
    """Refuse, before any work is done, a place that holds something else."""
    if folder.exists() and not folder.is_dir():
        raise BadOption("--out", str(folder), "a folder; this is a file")
    if folder.is_dir() and any(folder.iterdir()):
        try:
            ours = (
                json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["command"]
                == COMMAND
            )
        except (OSError, ValueError, KeyError, TypeError):
            ours = False
        if not ours:
            raise BadOption(
                "--out",
                str(folder),
                f"a new folder, an empty one, or one that `seecause {COMMAND}` made",
            )


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
