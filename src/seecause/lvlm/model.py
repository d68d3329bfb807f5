"""What users hold: a native vision-language model, its decoder named and split, and verified.

`wrap` and `load` make three probes that the decoder view computes what the model computes:

logits     the view's answer equals the native one
blocks     so does every block's output
attention  the text rows alone, reading recorded keys, give the native rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from seecause._files import digest
from seecause.engine.verify import TOLERANCE, Probe, compare, listening
from seecause.engine.walk import walk
from seecause.errors import BadOption, BadPrompt, MissingWeights, UnknownName, ViewMismatch
from seecause.lvlm import prompt as prompts
from seecause.lvlm._cache import (
    gated_feed,
    norm_of_rows,
    read_shared,
    rotate_rows,
    with_own_text,
)
from seecause.lvlm.prompt import Prompt
from seecause.models import decoder
from seecause.models._settled import tensor_key
from seecause.models.block import Block, chain
from seecause.models.decoder import Decoder, causal, rotate, run
from seecause.models.hub import fetched, pretrained, pretrained_model
from seecause.models.sources import ZOO
from seecause.types import wide_dtype

_SAMPLED = 1024  # values of each weight that the fingerprint reads
# 1 / r and 1 / r^2, r^3 = r + 1: turns of these shares fill a square evenly
_STEPS = (0.7548776662466927, 0.5698402909980532)
LIBRARIES = ("builtin", "hf")
SIDE = (224, 320)  # of the noise picture


@dataclass(eq=False, kw_only=True, repr=False)
class LVLM:
    """A view of a native vision-language model. `prompt` turns a picture and a question into what
    its decoder sees."""

    module: Any
    decoder: Decoder
    name: str
    processor: Any = None
    template: str | None = None  # with {image} and {question}; None: the processor's chat template
    _named: tuple[Any, str] | None = None  # state of the weights, and their fingerprint

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

    def prompt(
        self,
        image: Image.Image | Sequence[Image.Image],
        question: str,
        answer: str | Sequence[int] | None = None,
    ) -> Prompt:
        """The sequence for a picture and a question; `answer`, text or token ids, is put behind it
        as if already said."""
        self._need_processor()
        text = prompts.render(self.processor, question, self.template)
        inputs = prompts.native_inputs(self, image, text)
        assert isinstance(image, Image.Image)
        if answer is not None:
            if isinstance(answer, str):
                answer = prompts.answer_ids(self, image, text, answer)
            inputs = prompts.extended(inputs, answer)
        return prompts.read(self, inputs, size=(image.height, image.width))

    def answer_ids(self, image: Image.Image, question: str, answer: str) -> list[int]:
        """The tokens of an answer as they would follow the question."""
        self._need_processor()
        text = prompts.render(self.processor, question, self.template)
        return prompts.answer_ids(self, image, text, answer)

    def read(self, inputs: Mapping[str, Any]) -> Prompt:
        """A prompt from the native model's own inputs."""
        return prompts.read(self, self.send(inputs))

    @torch.no_grad()
    def speak(self, prompt: Prompt, length: int) -> list[int]:
        """The first tokens of the model's own answer, at most `length`, the likeliest each time;
        fewer where it ends before (its end is not a word)."""
        plain = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        with decoder.NATIVE_RUN:
            sequence = self.module.generate(**prompt.inputs, max_new_tokens=length, **plain)
        ids, ends = (
            sequence[0, len(prompt.ids) :].tolist(),
            self.module.generation_config.eos_token_id,
        )
        ended = ids and ids[-1] in (ends if isinstance(ends, list) else [ends])
        return ids[:-1] if ended else ids

    @torch.no_grad()
    def readout(self, token: int, vocabulary: int | None = None) -> Tensor:
        """[D]: its dot product with a normed state is the token's logit less the mean logit of the
        vocabulary (its first `vocabulary` words)."""
        weight = self.decoder.head.weight
        if vocabulary is not None and not 0 < vocabulary <= len(weight):
            raise BadOption("vocabulary", vocabulary, f"a number of words up to {len(weight)}")
        kind = wide_dtype(weight.dtype)
        return weight[token].to(kind) - weight[:vocabulary].mean(dim=0, dtype=kind)

    def send(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors on the model's device, pictures in its dtype."""
        sent = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                kind = self.dtype if value.is_floating_point() else value.dtype
                sent[name] = value.to(self.device, kind)
        return sent

    def pieces(self, ids: Tensor) -> tuple[str, ...]:
        """Tokens as readable pieces; numbers where there is no tokenizer."""
        tokenizer = getattr(self.processor, "tokenizer", None)
        return tuple(str(i) if tokenizer is None else tokenizer.decode([i]) for i in ids.tolist())

    def fingerprint(self) -> str:
        """A digest of the weights, for manifests: values of each, spread evenly over its rows and
        columns, since a whole model takes too long to read. Taken anew only when they changed."""
        named = list(self.module.named_parameters())
        state = tuple(tensor_key(tensor) for _, tensor in named)
        if self._named is not None and self._named[0] == state:
            return self._named[1]
        sampled = [
            _spread(tensor.detach(), _SAMPLED).to(self.device).double() for _, tensor in named
        ]
        shapes = repr([(name, list(tensor.shape)) for name, tensor in named])
        self._named = (state, digest(shapes, torch.cat(sampled).cpu().numpy().tobytes()))
        return self._named[1]

    def _need_processor(self) -> None:
        if self.processor is None:
            raise BadPrompt(
                "a question in words",
                "this model was wrapped without a processor",
                "wrap(module, processor), or use lvlm.read(inputs)",
            )


def _spread(values: Tensor, count: int) -> Tensor:
    """`count` of the values (all, where there are no more): any few rows or columns side by side,
    such as a head's, hold some of them."""
    if values.numel() <= count:
        return values.flatten()
    table = values.reshape(-1, values.shape[-1])  # [R, C]
    steps = torch.tensor(_STEPS, dtype=torch.float64)
    turns = torch.arange(count, dtype=torch.float64)[:, None] * steps % 1
    row, column = (turns * torch.tensor(table.shape)).long().to(values.device).unbind(dim=1)
    return table[row, column]


def wrap(
    module: nn.Module,
    processor: Any = None,
    *,
    name: str | None = None,
    template: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    check: bool = True,
) -> LVLM:
    """A verified view of a transformers vision-language model. The module is put into eval mode and
    its parameters are frozen.

    `template` replaces the processor's chat template: a text with {image} and {question}. Without a
    processor, give native `inputs` to verify with, and make prompts from native inputs
    (`lvlm.read`).
    """
    module.eval().requires_grad_(False)
    if template is not None and not all(field in template for field in ("{image}", "{question}")):
        raise BadOption("template", template, "a text with {image} and {question} in it")
    view = LVLM(
        module=module,
        decoder=decoder.find(module),
        name=name or type(module).__name__,
        processor=processor,
        template=template,
    )
    for block in view.blocks:
        native: Any = block.native
        block.rotate, block.norm = rotate_rows, norm_of_rows(native.input_layernorm)
        block.feed = chain(norm_of_rows(native.post_attention_layernorm), gated_feed(native.mlp))
    if check:
        verify(view, None if inputs is None else view.read(inputs))
    return view


def load(
    spec: str,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    template: str | None = None,
    check: bool = True,
) -> LVLM:
    """A vision-language model by name: `builtin:critters-llava`, `hf:NAME-OR-FOLDER`, or a folder
    that transformers wrote."""
    library, _, where = spec.partition(":")
    if library not in LIBRARIES or not where:
        if not Path(spec).is_dir():
            names = [f"{library}:NAME" for library in LIBRARIES]
            raise UnknownName("vision-language model", spec, names)
        library, where = "hf", spec
    if library == "builtin":
        where = str(_builtin(where))
    module, processor = _open(where)
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(kind, torch.dtype):
        raise BadOption("dtype", dtype, "float32, bfloat16, float16 or float64")
    default = torch.float32 if library == "builtin" else None  # builtin files hold half precision
    module.to(device=device, dtype=kind or default)
    return wrap(module, processor, name=spec, template=template, check=check)


def _builtin(name: str) -> Path:
    folder = ZOO / name
    if (folder / "config.json").is_file():
        return folder
    if name.startswith("critters-llava"):
        make = f"Make it with `seecause zoo train {name} --out DIR`, then name DIR/{name}"
        raise MissingWeights(f"builtin:{name}", "this copy of the package does not hold it", make)
    names = [path.parent.name for path in ZOO.glob("*/config.json")]
    raise UnknownName("builtin vision-language model", name, names)


def _open(where: str) -> tuple[Any, Any]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from seecause.models.decoder import restrict

    module, processor = fetched(
        f"hf:{where}",
        lambda: (
            pretrained_model(AutoModelForImageTextToText, where, dtype="auto"),
            pretrained(AutoProcessor, where),
        ),
        repo=None if Path(where).is_dir() else where,
        remedy="Give a name or folder of transformers",
    )
    readers = getattr(module.config.text_config, "image_readers", None)
    return (restrict(module) if readers else module), processor


def noise_prompt(lvlm: LVLM, seed: int = 0) -> Prompt:
    """A picture of noise and a question, where nothing better is at hand."""
    if lvlm.processor is None:
        raise BadOption(
            "processor", None, "a processor, native `inputs` to verify with, or check=False"
        )
    pixels = np.random.default_rng(seed).integers(0, 256, (*SIDE, 3), dtype=np.uint8)
    return lvlm.prompt(Image.fromarray(pixels), "What is in the picture?")


@torch.no_grad()
def verify(lvlm: LVLM, prompt: Prompt | None = None) -> list[Probe]:
    """Run the probes; raises `ViewMismatch` with the probe and the block."""
    prompt = prompt or noise_prompt(lvlm)
    decoder = lvlm.decoder
    with listening([block.native for block in decoder.blocks]) as outputs:
        native = lvlm.module(**prompt.inputs, use_cache=False).logits
    if not torch.isfinite(native).all():
        raise ViewMismatch(
            "logits",
            "the native model",
            "its answer is not finite (NaN or infinite weights)",
            "Give intact weights",
        )
    if len(outputs) != len(decoder.blocks):
        seen = f"{len(outputs)} of {len(decoder.blocks)} blocks were called"
        raise ViewMismatch("blocks", "the native run", seen)
    keys: list[tuple[Tensor, Tensor]] = []
    final = run(
        decoder,
        prompt.embeddings,
        prompt.at,
        deepstack=prompt.deepstack,
        image=prompt.image,
        record=lambda _, k, v: keys.append((k, v)),
    )
    tolerance = TOLERANCE.get(lvlm.dtype, 2e-4)
    blocks = _text_rows(lvlm, prompt, keys, outputs, tolerance)
    words = f"{native.shape[-1]} words"
    answer = decoder.head(decoder.norm(final))
    logits = compare("logits", "the vocabulary", answer, native, tolerance, words)
    return [logits, *blocks]


def _text_rows(
    lvlm: LVLM,
    prompt: Prompt,
    keys: list[tuple[Tensor, Tensor]],
    outputs: list[Tensor],
    tolerance: float,
) -> list[Probe]:
    """Text rows of every block from the native rows before it: plainly, and over recorded keys."""
    at, text = prompt.at, prompt.text
    rows, before = at.take(at.index[text]), at.take(at.index[: text.start])
    plain, banked = 0.0, 0.0
    for step in walk(lvlm, prompt.embeddings, at):
        block, expected, states = step.block, outputs[step.index], step.h[:, text]
        probe = compare("blocks", block.name, block(step.h, at), expected, tolerance, "")
        plain = max(plain, probe.worst)
        q, k, v = block.qkv(states, rows)
        old_k, old_v = (old[:, :, : text.start] for old in keys[step.index])
        bias = None if block.additive is causal else block.bias(rows, before)
        shared = read_shared(q, rotate(old_k, before), old_v, scale=block.scale, bias=bias)
        choose = torch.ones(shared[1].shape, dtype=torch.bool, device=q.device)
        o = with_own_text(q, k, v, shared, shared, choose, scale=block.scale)
        got = block.finish(states, o)
        probe = compare("attention", block.name, got, expected[:, text], 2 * tolerance, "")
        banked = max(banked, probe.worst)
        step.out = expected  # the next block starts from the native states
        if step.index < len(prompt.deepstack):
            step.out = _with_deepstack(expected, prompt, step.index)
    tested = f"{prompt.n_text} text rows against {text.start} recorded keys, every block"
    return [
        Probe("blocks", plain, f"{lvlm.n_layers} block outputs"),
        Probe("attention", banked, tested),
    ]


def _with_deepstack(states: Tensor, prompt: Prompt, index: int) -> Tensor:
    states = states.clone()
    states[:, prompt.image] += prompt.deepstack[index].to(states)
    return states
