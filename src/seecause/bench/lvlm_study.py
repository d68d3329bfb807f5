"""Head attribution of one question over a dataset, in shards that survive a power cut.

Each sample has up to three shards: its heads and text rows; other wordings and shares of ablated
heads; and its image tokens, given the text rows that the whole dataset keeps. The same question
again reads what is finished.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from seecause._software import arithmetic, versions
from seecause.bench.lvlm_table import LVLMStudy, TracedSample
from seecause.bench.shard_files import EncodedShard, ShardResult, encoded
from seecause.bench.store import ShardStore
from seecause.bench.workers import SerialPool, WorkerPool, Workers, open_pool, record_result
from seecause.data.dataset import Dataset, Sample
from seecause.data.images import to_pil
from seecause.errors import (
    BadInput,
    BadOption,
    DataMissing,
)
from seecause.files import digest, digest_json, place
from seecause.lvlm import (
    LVLM,
    MaskEngine,
    MeanBank,
    check_masks_suffice,
    compare_wordings,
    load,
    object_share,
    ratio_study,
    seen_mask,
    text_effects,
    trace_heads,
    trace_tokens,
)
from seecause.lvlm.analysis import cosines
from seecause.lvlm.bank import picture_digest
from seecause.lvlm.masks import MASKS, How
from seecause.lvlm.trace import HeadTrace, TokenTrace, rows_of

COMMAND = "lvlm study"
# what one sample may do; anything else stops the study
SKIPPED = (BadInput, DataMissing)


@dataclass(frozen=True)
class StudyOptions:
    """What decides every shard, samples apart."""

    question: str
    masks: int = MASKS["derivative"]
    token_masks: int = MASKS["derivative"]  # 0: heads and text rows only
    p: float = 0.75
    floor: float | None = 1.0  # None: see MaskEngine
    right_only: bool = False  # samples whose answer is not their class are left out
    seed: int = 0
    how: How = "derivative"  # see `attribute_heads`
    wordings: tuple[str, ...] = ()  # other ways to ask the same
    ratios: tuple[float, ...] = ()  # other shares of ablated heads

    @property
    def varies(self) -> bool:
        return bool(self.wordings or self.ratios)


def run_lvlm_study(
    lvlm: LVLM,
    bank: MeanBank,
    data: Dataset,
    options: StudyOptions,
    folder: Path | str,
    *,
    workers: Workers | int | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> LVLMStudy:
    """Every sample's heads and text rows, then other wordings and ratios, and, given the rows kept
    by the dataset's mean, its image tokens. `advance` hears of every shard. Workers elsewhere load
    the model by its name."""
    store, rest = study_store(folder), (bank, data, options)
    tracer = _Tracer(lvlm, *rest)
    job = LVLMJob(lvlm.name, lvlm.fingerprint(), str(lvlm.dtype), lvlm.device.type, rest)
    with store.locked(), open_pool(job, workers, most=len(data), perform=tracer.perform) as pool:
        about = {"model": lvlm.name, "data": data.name, "samples": len(data), **asdict(options)}
        store.write_manifest(about)
        samples = _traced(store, pool, map(tracer.heads, range(len(data))), advance)
        if options.varies:
            samples = _traced(store, pool, map(tracer.variants, samples), advance)
        study = LVLMStudy(samples, *_dataset_rows(samples))
        if not options.token_masks or study.text is None:
            return study
        items = (tracer.tokens(sample, study.text) for sample in samples)
        return replace(study, samples=_traced(store, pool, items, advance))


def _traced(
    store: ShardStore,
    pool: SerialPool | WorkerPool,
    items: Iterator[_TraceItem],
    advance: Callable[[int], None],
) -> list[TracedSample]:
    """Samples with what their shards hold, in their order: read where finished, else made."""
    known: list[_TraceItem] = []
    lost: dict[str, str] = {}

    def next_item() -> _TraceItem | None:
        for item in items:
            known.append(item)
            if item.key and store.read(item.key) is None:
                return item
            advance(1)
        return None

    for item, answer in pool.run(next_item):
        if answer.failure:
            lost[item.key] = answer.failure
        record_result(store, item.key, answer)
        advance(1)
    return [_with_shard(item, store, lost.get(item.key, "")) for item in known]


def _with_shard(item: _TraceItem, store: ShardStore, lost: str) -> TracedSample:
    sample = item.sample
    if not item.key:
        return sample
    shard = _shard_result(skipped=lost) if lost else store.read(item.key)
    assert shard is not None
    numbers = sample.numbers | shard.metadata["numbers"]
    tensors, skipped = sample.tensors | dict(shard.tensors), shard.metadata["skipped"]
    return replace(sample, numbers=numbers, tensors=tensors, **{_HOLES[item.part]: skipped})


def study_store(folder: Path | str) -> ShardStore:
    """The store of a study; `check` refuses a folder that holds something else."""
    return ShardStore(place(folder), COMMAND)


def seed_of(name: str, seed: int = 0) -> int:
    """A seed of its own for every sample: shared masks would correlate their errors."""
    published = hashlib.sha256(f"{seed} {name}".encode())  # not `digest`: results name these seeds
    return int(published.hexdigest()[:10], 16)


def head_numbers(engine: MaskEngine, trace: HeadTrace) -> dict[str, Any]:
    """What a table says about one sample's heads."""
    fit = trace.heads
    numbers = {"answer": engine.answer, "span": engine.span, "r2": fit.r2, "pearson": fit.pearson}
    numbers |= {"split_half": fit.agreement, "standard_error": float(fit.standard_error.median())}
    for name, (enough, needed) in trace.counts().items():
        numbers |= {f"enough_{name}": enough, f"needed_{name}": needed}
    return numbers


def token_numbers(trace: TokenTrace, mask: Tensor | None) -> dict[str, Any]:
    """And about its image tokens; with the object's mask in their frame (`seen_mask`), how much
    lies on the object. None: nothing positive to share out."""
    numbers: dict[str, Any] = {
        "sufficiency": trace.sufficiency,
        "token_r2": trace.tokens.r2,
        "token_split_half": trace.tokens.agreement,
        "token_attention": trace.agreement,
    }
    if mask is not None:
        gamma = object_share(trace.tokens.coefficients, trace.tokens.tokens, mask)
        weighted = object_share(trace.weighted, trace.tokens.tokens, mask)
        numbers["object_share"] = None if gamma is None else gamma.share
        numbers["object_area"] = None if gamma is None else gamma.area
        numbers["object_hit"] = None if gamma is None else float(gamma.hit)
        numbers["weighted_object_share"] = None if weighted is None else weighted.share
    return numbers


Part = Literal["heads", "variants", "tokens"]
_HOLES: dict[Part, str] = {
    "heads": "skipped",
    "variants": "variants_skipped",
    "tokens": "tokens_skipped",
}


@dataclass(frozen=True, eq=False)
class _TraceItem:
    """A sample, the part of it that is to be traced, and for image tokens the text rows that may
    see; without a key there is nothing to do."""

    sample: TracedSample
    key: str = ""
    part: Part = "heads"
    text: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LVLMJob:
    """A study as it travels: the model by its name, and the rest."""

    name: str
    fingerprint: str
    dtype: str
    device: str
    rest: tuple[MeanBank, Dataset, StudyOptions]
    versions: Mapping[str, str] = field(default_factory=versions)
    threads: int = field(default_factory=torch.get_num_threads)
    # none: what a sample may do becomes a hole of its shard
    failures: ClassVar[tuple[type[Exception], ...]] = ()

    def open(self) -> Callable[[_TraceItem], EncodedShard]:
        dtype = self.dtype.removeprefix("torch.")
        lvlm = load(self.name, device=self.device, dtype=dtype, check=False)
        if lvlm.fingerprint() != self.fingerprint:
            expected = (
                f"the model of this study, {self.fingerprint}: it changed since, or is another"
            )
            raise BadOption("model", f"{self.name}, {lvlm.fingerprint()}", expected)
        return _Tracer(lvlm, *self.rest).perform


@dataclass(frozen=True, eq=False)
class _Tracer:
    """One study: what makes its shards."""

    lvlm: LVLM
    bank: MeanBank
    data: Dataset
    options: StudyOptions

    def heads(self, index: int) -> _TraceItem:
        try:
            sample = self.data[index]
        except SKIPPED as reason:
            return _TraceItem(TracedSample(index, str(index), None, skipped=_reason(reason)))
        classes = self.data.classes
        label = classes[sample.label] if sample.label is not None and classes else None
        options = replace(self.options, token_masks=0, wordings=(), ratios=())
        key = self._key(sample, label, options, "heads")
        return _TraceItem(TracedSample(index, sample.id or str(index), label), key)

    def variants(self, traced: TracedSample) -> _TraceItem:
        return self._further(traced, "variants", replace(self.options, token_masks=0))

    def tokens(self, traced: TracedSample, text: Tensor) -> _TraceItem:
        options = replace(self.options, wordings=(), ratios=())
        return self._further(traced, "tokens", options, text)

    def _further(
        self, traced: TracedSample, part: Part, options: StudyOptions, text: Tensor | None = None
    ) -> _TraceItem:
        """What comes after a sample's heads."""
        if traced.skipped:
            return _TraceItem(traced)
        try:
            sample = self.data[traced.index]
        except SKIPPED as reason:
            return _TraceItem(replace(traced, **{_HOLES[part]: _reason(reason)}))
        decides: Any = part
        if text is not None:  # image tokens are also measured by the object's mask
            seen = "" if sample.mask is None else digest(sample.mask.cpu().numpy().tobytes())
            decides = [part, text.int().tolist(), seen]
        return _TraceItem(traced, self._key(sample, traced.label, options, decides), part, text)

    def perform(self, item: _TraceItem) -> EncodedShard:
        """What cannot be made stays as a hole with its reason."""
        try:
            sample = self.data[item.sample.index]
            if item.text is not None:
                return encoded(self._trace_tokens(sample, item.sample, item.text))
            trace = self._trace_heads if item.part == "heads" else self._trace_variants
            return encoded(trace(sample, item.sample))
        except SKIPPED as reason:
            return encoded(_shard_result(skipped=_reason(reason)))

    def _trace_heads(self, sample: Sample, start: TracedSample) -> ShardResult:
        engine, options, label = self._engine(sample), self.options, start.label
        check_masks_suffice(engine, options.masks, options.token_masks, how=options.how)
        right = None
        if label is not None:
            ids = self.lvlm.answer_ids(to_pil(sample.image), options.question, label)
            right = engine.target == ids[0]
        if options.right_only and not right:
            expected = "the class" if label is None else repr(label)
            return _shard_result(skipped=f"answers {engine.answer!r}, not {expected}")
        seed = seed_of(start.id, options.seed)
        trace = trace_heads(engine, how=options.how, masks=options.masks, p=options.p, seed=seed)
        effects = text_effects(engine, trace.chosen)
        tensors = {
            "coefficients": trace.heads.coefficients,
            "standard_error": trace.heads.standard_error,
            "attention": trace.attention,
            "causal": trace.causal,
            "chosen": trace.chosen,
            "deltas": effects.deltas,
        }
        for name, curves in trace.curves.items():
            tensors[f"faithfulness.{name}"] = curves.faithfulness.mean(dim=0)
            tensors[f"completeness.{name}"] = curves.completeness.mean(dim=0)
        numbers = head_numbers(engine, trace)
        return _shard_result({**numbers, "right": right, "pieces": list(effects.pieces)}, tensors)

    def _trace_variants(self, sample: Sample, traced: TracedSample) -> ShardResult:
        """Cosines of the coefficients with those of other wordings and other ratios."""
        engine, options, numbers = self._engine(sample), self.options, dict[str, Any]()
        fit: dict[str, Any] = {"how": options.how, "masks": options.masks}
        fit["seed"] = seed_of(f"{traced.id} variants", options.seed)
        if options.wordings:
            questions = (options.question, *options.wordings)
            compared = compare_wordings(
                self.lvlm, to_pil(sample.image), questions, self.bank, p=options.p,
                floor=options.floor, answer=[engine.target], **fit,
            )  # fmt: skip
            for place, cosine in enumerate(compared.cosines.tolist(), 1):
                numbers[f"cosine_wording_{place}"] = cosine
            numbers["ceiling"] = compared.ceiling
        own = traced.tensors["coefficients"][None]
        ranked = ratio_study(engine, options.ratios, **fit)
        for ratio, ranking in zip(options.ratios, ranked, strict=True):
            numbers |= {
                f"cosine_p_{ratio:g}": float(cosines(ranking.heads.coefficients[None], own)),
                f"r2_p_{ratio:g}": ranking.heads.r2,
                f"enough_p_{ratio:g}": ranking.enough,
                f"needed_p_{ratio:g}": ranking.needed,
            }
        return _shard_result(numbers)

    def _trace_tokens(self, sample: Sample, traced: TracedSample, text: Tensor) -> ShardResult:
        engine = self._engine(sample)
        trace = trace_tokens(
            engine,
            traced.tensors["coefficients"],
            traced.tensors["chosen"],
            text=text,
            how=self.options.how,
            masks=self.options.token_masks,
            p=self.options.p,
            seed=seed_of(traced.id, self.options.seed),
        )
        mask = None if sample.mask is None else seen_mask(self.lvlm, engine.prompt, sample.mask)
        tensors = {"gamma": trace.tokens.coefficients, "weighted": trace.weighted}
        return _shard_result(token_numbers(trace, mask), tensors)

    def _engine(self, sample: Sample) -> MaskEngine:
        picture, options = to_pil(sample.image), self.options
        return MaskEngine(self.lvlm, picture, options.question, self.bank, floor=options.floor)

    def _key(self, sample: Sample, label: str | None, options: StudyOptions, part: Any) -> str:
        """A digest of everything that decides a shard."""
        lvlm, bank = self.lvlm, self.bank
        calibration = [bank.mode, bank.size, *bank.digests]
        where = [lvlm.device.type, str(lvlm.dtype), versions(), arithmetic()]
        picture = [picture_digest(to_pil(sample.image)), sample.id, label]
        decides = [lvlm.fingerprint(), calibration, picture, asdict(options), where, part]
        return digest_json(decides, length=20)


def _shard_result(
    numbers: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
    *,
    skipped: str | None = None,
) -> ShardResult:
    metadata = {"numbers": numbers or {}, "skipped": skipped}
    return ShardResult(tensors=tensors or {}, metadata=metadata)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())


def _dataset_rows(samples: Sequence[TracedSample]) -> tuple[Tensor | None, tuple[str, ...]]:
    """u* by the mean effect over the dataset, and the pieces of the text rows."""
    traced = [sample for sample in samples if sample.skipped is None]
    if not traced:
        return None, ()
    deltas = torch.stack([sample.tensors["deltas"] for sample in traced])
    return rows_of(deltas.mean(dim=0)), tuple(traced[0].numbers["pieces"])
