"""A native vision-language model, its decoder named and split, and verified.

`wrap` and `load` check by three probes that the decoder view computes what the model computes:

logits     the view's logits equal the native ones
blocks     so does every block's output
attention  the text rows alone, reading recorded keys, give the native rows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from seecause.engine.verify import TOLERANCE, Probe, compare, listening, need_finite
from seecause.engine.walk import walk
from seecause.errors import BadInput, BadOption, UnknownName
from seecause.files import digest
from seecause.loading import ZOO, fetched, pretrained, pretrained_model, trusting
from seecause.lvlm import prompt as prompts
from seecause.lvlm.cache import (
    norm_of_rows,
    read_shared,
    rotate_rows,
    text_keep,
    with_own_text,
)
from seecause.lvlm.prompt import Prompt
from seecause.models import decoder
from seecause.models.base import device_of, parse_device, parse_dtype, weights_key
from seecause.models.block import Block, chain, wide_dtype
from seecause.models.decoder import Decoder, norms_of, sees_all_before, with_deepstack
from seecause.options import checked

Head = tuple[int, int]  # (layer, head), both from 0
_SAMPLED = 1024  # minimum number of values of each weight that the fingerprint reads
SIDE = (224, 320)  # height and width of the noise image for the verification
CALIBRATION = 100  # default number of calibration images
_START = 1 << 30  # index beyond all Critters images used for training or testing


@dataclass(eq=False, kw_only=True, repr=False)
class LVLM:
    """A view of a native vision-language model, returned by `load` and `wrap`.

    Attributes:
        module: The native model.
        decoder: Its language model, split into blocks.
        name: The name of the model in results.
        processor: The model's processor, which turns images and questions into inputs, or None.
        template: A text with {image} and {question} in place of the processor's chat template.
    """

    module: Any
    decoder: Decoder
    name: str
    processor: Any = None
    template: str | None = None
    memo: dict[Any, Any] = field(default_factory=dict)  # what was found out about these weights

    @property
    def family(self) -> str:
        return f"transformers.{type(self.module).__name__}"

    @property
    def blocks(self) -> list[Block]:
        return self.decoder.blocks

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    @property
    def n_heads(self) -> int:
        """Query heads of one block."""
        return self.blocks[0].heads

    @property
    def device(self) -> torch.device:
        return self.decoder.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.head.weight.dtype

    def __repr__(self) -> str:
        shape = f"{self.n_layers} blocks x {self.n_heads} heads"
        kind = str(self.dtype).removeprefix("torch.")
        return f"LVLM({self.name!r}, {self.family}, {shape}, {self.device}, {kind})"

    @checked
    def prompt(
        self, image: Image.Image, question: str, answer: str | Sequence[int] | None = None
    ) -> Prompt:
        """The sequence for an image and a question; `answer`, text or token ids, is appended to
        it."""
        _, inputs = self._native(image, question)
        if answer is not None:
            ids = self.answer_ids(image, question, answer)
            inputs = prompts.extended(inputs, ids, token_type=int(self.decoder.reads_prefix))
        return prompts.read(self, inputs, size=(image.height, image.width))

    def answer_ids(
        self,
        image: Image.Image,
        question: str,
        answer: str | Sequence[int] | None,
        length: int = 1,
    ) -> list[int]:
        """The tokens of an answer as they follow the question, at least one; of None, of the
        model's own answer, at most `length`."""
        if isinstance(answer, str):
            text, _ = self._native(image, question)
            return prompts.answer_ids(self, image, text, answer)
        expected = "at least one token"
        if answer is None:
            expected = "an answer to explain: the model generates no token"
            answer = self.speak(self.prompt(image, question), length)
        if not len(answer):
            raise BadOption("answer", answer, expected)
        return [int(token) for token in answer]

    def _native(self, image: Image.Image, question: str) -> tuple[str, dict[str, Any]]:
        """The rendered text of a question, and the model's inputs."""
        if self.processor is None:
            raise BadInput(
                "a question in words",
                "this model was wrapped without a processor",
                "use wrap(module, processor), or lvlm.read(inputs)",
            )
        text = prompts.render(self.processor, question, self.template)
        return text, prompts.native_inputs(self, image, text)

    def read(self, inputs: Mapping[str, Any]) -> Prompt:
        """A prompt from the native model's own inputs."""
        return prompts.read(self, self.send(inputs))

    @torch.no_grad()
    def speak(self, prompt: Prompt, length: int, **options: Any) -> list[int]:
        """The first tokens of the model's own answer, at most `length`, the likeliest each time;
        fewer where it ends before (the end token is left out)."""
        ids = self.generate(prompt, length, **options)[0, len(prompt.ids) :].tolist()
        ends = self.module.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return ids[:-1] if ids and ids[-1] in ends else ids

    @torch.no_grad()
    def generate(self, prompt: Prompt, length: int, **options: Any) -> Any:
        """What the native `generate` returns of a prompt, the likeliest token each time."""
        with decoder.NATIVE_RUN, _plain_generation(self.module):
            return self.module.generate(**prompt.inputs, max_new_tokens=length, **options)

    @torch.no_grad()
    def next_logits(self, prompt: Prompt) -> Tensor:
        """[V]: the native model's logits of the next token."""
        return self.module(**prompt.inputs, use_cache=False, logits_to_keep=1).logits[0, -1]

    @torch.no_grad()
    def readout(self, token: int) -> Tensor:
        """[D]: its dot product with a normed state is the token's logit less the mean logit of the
        vocabulary."""
        weight = self.decoder.head.weight
        kind = wide_dtype(weight.dtype)
        difference = weight[token].to(kind) - weight.mean(dim=0, dtype=kind)
        return difference * self.decoder.logit_scale

    def send(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors on the model's device, images in its dtype; without labels."""
        sent = {name: value for name, value in inputs.items() if name != "labels"}
        for name, value in sent.items():
            if isinstance(value, Tensor):
                kind = self.dtype if value.is_floating_point() else value.dtype
                sent[name] = value.to(self.device, kind)
        return sent

    def pieces(self, ids: Tensor) -> tuple[str, ...]:
        """Tokens as readable pieces; numbers where there is no tokenizer."""
        tokenizer = getattr(self.processor, "tokenizer", None)
        return tuple(str(i) if tokenizer is None else tokenizer.decode([i]) for i in ids.tolist())

    def unknown_words(self, text: str) -> list[str]:
        """Words that the tokenizer has no token for: the model reads them all as the same."""
        tokenizer = getattr(self.processor, "tokenizer", None)
        unknown = getattr(tokenizer, "unk_token_id", None)
        if tokenizer is None or unknown is None:
            return []
        words = dict.fromkeys(text.split())
        return [w for w in words if unknown in tokenizer(w, add_special_tokens=False)["input_ids"]]

    def fingerprint(self) -> str:
        """A digest of the weights, for manifests: some values of each, since a whole model takes
        too long to read. Computed anew only when they changed."""
        named = list(self.module.named_parameters())
        state = weights_key([tensor for _, tensor in named])
        if self.memo.get("fingerprint", (None,))[0] != state:
            # an odd step samples every head
            sampled = [x.detach().flatten()[:: x.numel() // _SAMPLED | 1] for _, x in named]
            sampled = [values.to(self.device).double() for values in sampled]
            shapes = repr([(name, list(tensor.shape)) for name, tensor in named])
            self.forget()
            name = digest(shapes, torch.cat(sampled).cpu().numpy().tobytes())
            self.memo["fingerprint"] = (state, name)
        return self.memo["fingerprint"][1]

    def tensors(self) -> list[Tensor]:
        """All parameters."""
        return list(self.module.parameters())

    def forget(self) -> None:
        """Drop what was found out about the weights: the fingerprint, and that edits reach them."""
        self.memo.clear()


@contextmanager
def _plain_generation(module: Any) -> Iterator[None]:
    """Inside the block, `generate` ignores the checkpoint's settings: penalties, beams, sampling. A
    call would use them for all values that it does not pass."""
    from transformers import GenerationConfig

    own = module.generation_config
    ends = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    module.generation_config = GenerationConfig(**ends, do_sample=False)
    try:
        yield
    finally:
        module.generation_config = own


def wrap(
    module: nn.Module,
    processor: Any = None,
    *,
    name: str | None = None,
    template: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    check: bool = True,
) -> LVLM:
    """Make a view of a transformers vision-language model in memory.

    The module is put into eval mode and its parameters are frozen.

    Args:
        module: The native model.
        processor: The model's own, which turns images and questions into its inputs. Without one,
            make prompts of native inputs: `lvlm.read(inputs)`.
        name: What results call the model.
        template: A text with {image} and {question} in place of the processor's chat template.
        inputs: Native inputs to verify with, where there is no processor.
        check: Whether to verify that the view computes what the module computes.

    Returns:
        An `LVLM`.

    Raises:
        UnsupportedModel: If the model's family is not supported.
        ViewMismatch: If the view does not compute what the module computes.

    Example:
        >>> import seecause as sc
        >>> native = sc.lvlm.load("builtin:critters-llava")
        >>> sc.lvlm.wrap(native.module, native.processor, name="mine").name
        'mine'
    """
    device_of(module)
    module.eval().requires_grad_(False)
    if template is not None and not ("{image}" in template and "{question}" in template):
        raise BadOption("template", template, "a text with {image} and {question} in it")
    view = LVLM(
        module=module,
        decoder=decoder.find(module),
        name=name or type(module).__name__,
        processor=processor,
        template=template,
    )
    if template is None and view.decoder.reads_prefix:
        view.template = prompts.BARE
    for block, table in zip(view.blocks, view.decoder.tables, strict=True):
        native: Any = block.native
        _, before, behind = norms_of(native)
        if decoder.turns(native):
            block.rotate = partial(rotate_rows, table=table)
        block.norm = norm_of_rows(native.input_layernorm)
        block.feed = chain(norm_of_rows(before), native.mlp, behind)
    if check:
        verify(view, None if inputs is None else view.read(inputs))
    return view


def load(
    spec: str,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    template: str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
) -> LVLM:
    """Open a vision-language model and verify its view; docs/models.md lists what works.

    Args:
        spec: "builtin:NAME", "hf:NAME-OR-FOLDER", or a folder that transformers wrote.
        device: Such as "cuda"; None: where transformers puts it, the CPU unless quantised.
        dtype: "float32", "bfloat16", "float16" or "float64"; None: as stored (builtin models:
            float32).
        template: A text with {image} and {question} in place of the processor's chat template.
        trust_remote_code: Whether transformers may run code that lies beside the weights, with a
            warning. Its class must derive from one of a supported family.
        check: Whether to verify that the view computes what the native model computes.

    Returns:
        An `LVLM`.

    Example:
        >>> import seecause as sc
        >>> lvlm = sc.lvlm.load("builtin:critters-llava")
        >>> prompt = lvlm.prompt(sc.data.open_image("critters:clean:test#3"), "What is this?")
        >>> lvlm.n_layers, lvlm.n_heads, prompt.n_image
        (6, 8, 144)
    """
    builtin = {f"builtin:{path.parent.name}": path.parent for path in ZOO.glob("*/config.json")}
    library, _, name = spec.partition(":")
    where = spec if Path(spec).is_dir() else builtin.get(spec, name if library == "hf" else "")
    if not where:
        raise UnknownName("vision-language model", spec, [*builtin, "hf:NAME-OR-FOLDER"])
    parse_device(device)
    kind = parse_dtype(dtype)
    with trusting(spec, trust_remote_code):
        module, processor = _open(str(where))
    default = torch.float32 if spec in builtin else None  # builtin files hold half precision
    # quantised weights stay as they are stored, where their library put them
    if getattr(module.config, "quantization_config", None) is not None:
        if dtype is not None:
            raise BadOption("dtype", dtype, "no value: this model is quantised and stays as stored")
    else:
        module.to(device=device, dtype=kind or default)
    return wrap(module, processor, name=spec, template=template, check=check)


def calibration_critters(count: int = CALIBRATION) -> list[Image.Image]:
    """Calibration images for the embedded models: every creature on every background, a third in
    each drawing style.

    Args:
        count: How many images.

    Returns:
        PIL images.

    Example:
        >>> len(calibration_critters(4))
        4
    """
    from seecause import critters
    from seecause.critters.rendering import STYLES
    from seecause.data.dataset import to_pil

    latents = critters.draw("balanced", "train", count, start=_START)
    parts = latents.split(-(-count // len(STYLES)))
    images = [
        critters.render(rows, style=style).image for style, rows in zip(STYLES, parts, strict=False)
    ]
    return [to_pil(image) for image in torch.cat(images)]


def _open(where: str) -> tuple[Any, Any]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    module, processor = fetched(
        f"hf:{where}",
        lambda: (
            pretrained_model(AutoModelForImageTextToText, where, dtype="auto"),
            pretrained(AutoProcessor, where),
        ),
        remedy=(
            "give a name or folder of transformers (of InternVL, one whose name ends in -hf), and"
            " install what reads its weights"
        ),
    )
    readers = getattr(module.config.text_config, "image_readers", None)
    return (decoder.restrict(module) if readers else module), processor


@torch.no_grad()
def verify(lvlm: LVLM, prompt: Prompt | None = None) -> list[Probe]:
    """Run the probes; raises `ViewMismatch` with the probe and the block."""
    prompt = prompt or _noise_prompt(lvlm)
    language = lvlm.decoder
    with listening([block.native for block in language.blocks]) as outputs:
        native = lvlm.module(**prompt.inputs, use_cache=False).logits.to(lvlm.device)
    outputs = [output.to(lvlm.device) for output in outputs]
    need_finite(native)
    keys: list[tuple[Tensor, Tensor]] = []
    final = decoder.run(
        language,
        prompt.embeddings,
        prompt.at,
        deepstack=prompt.deepstack,
        image=prompt.image,
        record=lambda _, k, v: keys.append((k, v)),
    )
    tolerance = TOLERANCE.get(lvlm.dtype, 2e-4)
    blocks = _verify_blocks(lvlm, prompt, keys, outputs, tolerance)
    words = f"{native.shape[-1]} words"
    got = language.logits(language.norm(final))
    return [compare("logits", "the vocabulary", got, native, tolerance, words), *blocks]


def _noise_prompt(lvlm: LVLM) -> Prompt:
    """An image of noise and a question; with an answer where its rows see otherwise than those of
    the question."""
    if lvlm.processor is None:
        expected = "a processor, native `inputs` to verify with, or check=False"
        raise BadOption("processor", None, expected)
    answer = [1, 2] if lvlm.decoder.reads_prefix else None
    return lvlm.prompt(noise_image(SIDE), "What is in the picture?", answer)


def noise_image(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Noise of a height and width."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _verify_blocks(
    lvlm: LVLM,
    prompt: Prompt,
    keys: list[tuple[Tensor, Tensor]],
    outputs: list[Tensor],
    tolerance: float,
) -> list[Probe]:
    """Every block from the native rows before it: all rows plainly, and text rows over recorded
    keys."""
    at, text = prompt.at, prompt.text
    rows, before = at.take(at.index[text]), at.take(at.index[: text.start])
    keep = text_keep(rows.index, prompt.prefix) if prompt.prefix > text.start else None
    worst = {"blocks": 0.0, "attention": 0.0}
    for step in walk(lvlm, prompt.embeddings, at):
        block, expected, states = step.block, outputs[step.index], step.h[:, text]
        q, k, v = block.qkv(states, rows)
        old_k, old_v = (old[:, :, : text.start] for old in keys[step.index])
        bias = None if sees_all_before(block) else block.bias(rows, before)
        assert block.rotate is not None
        shared = read_shared(q, block.rotate(old_k, before), old_v, scale=block.scale, bias=bias)
        choose = torch.ones(shared[1].shape, dtype=torch.bool, device=q.device)
        o = with_own_text(q, k, v, shared, shared, choose, scale=block.scale, keep=keep)
        for name, got, native, near in (
            ("blocks", block(step.h, at), expected, tolerance),
            ("attention", block.finish(states, o), expected[:, text], 2 * tolerance),
        ):
            worst[name] = max(worst[name], compare(name, block.name, got, native, near).worst)
        # the next block starts from the native states
        step.out = with_deepstack(expected, prompt.deepstack, step.index, prompt.image)
    tested = f"{prompt.n_text} text rows against {text.start} recorded keys, every block"
    return [
        Probe("blocks", worst["blocks"], f"{lvlm.n_layers} block outputs"),
        Probe("attention", worst["attention"], tested),
    ]
