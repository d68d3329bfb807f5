"""What users hold: a native vision-language model, its decoder named and split, and verified.

`wrap` and `load` make three probes that the decoder view computes what the model computes:

logits     the view's answer equals the native one
blocks     so does every block's output
attention  the text rows alone, reading recorded keys, give the native rows
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from seecause.errors import (
    BadInput,
    BadOption,
    DataMissing,
    UnknownName,
)
from seecause.files import digest
from seecause.lvlm import prompt as prompts
from seecause.lvlm._cache import gated_feed, norm_of_rows, rotate_rows
from seecause.lvlm._verify import verify
from seecause.lvlm.prompt import Prompt
from seecause.models import decoder
from seecause.models.block import Block, chain
from seecause.models.decoder import Decoder, norms_of
from seecause.models.eval_mode import weights_key
from seecause.models.load import (
    ZOO,
    device_of,
    fetched,
    parse_device,
    parse_dtype,
    pretrained,
    pretrained_model,
)
from seecause.types import wide_dtype

_SAMPLED = 1024  # values of each weight that the fingerprint reads
# 1 / r and 1 / r^2, r^3 = r + 1: turns of these shares fill a square evenly
_STEPS = (0.7548776662466927, 0.5698402909980532)
LIBRARIES = ("builtin", "hf")
CALIBRATION = 100  # pictures
_START = 1 << 30  # far from any picture of Critters that a model is trained or tested on


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
                ids = prompts.answer_ids(self, image, text, answer)
            else:
                ids = self.token_ids(answer)
            inputs = prompts.extended(inputs, ids, token_type=int(self.decoder.reads_prefix))
        return prompts.read(self, inputs, size=(image.height, image.width))

    def answer_ids(
        self,
        image: Image.Image,
        question: str,
        answer: str | Sequence[int] | None,
        length: int = 1,
    ) -> list[int]:
        """The tokens of an answer as they would follow the question, at least one; of None, of the
        model's own, at most `length`."""
        self._need_processor()
        if isinstance(answer, str):
            text = prompts.render(self.processor, question, self.template)
            return prompts.answer_ids(self, image, text, answer)
        remedy = "at least one token"
        if answer is None:
            remedy = "an answer of yours: the model says nothing"
            answer = self.speak(self.prompt(image, question), length)
        ids = self.token_ids(answer)
        if not ids:
            raise BadOption("answer", answer, remedy)
        return ids

    def token_ids(self, answer: Sequence[int]) -> list[int]:
        """An answer that was given as token ids, if the model has them."""
        most = len(self.decoder.head.weight) - 1
        if not isinstance(answer, Iterable):
            raise BadOption("answer", answer, "text, or a list of token ids")
        ids = [token.item() if isinstance(token, Tensor) else token for token in answer]
        for token in ids:
            whole = isinstance(token, Integral) and not isinstance(token, bool)
            if not whole or not 0 <= int(token) <= most:
                raise BadOption("answer", token, f"token ids, whole numbers from 0 to {most}")
        return [int(token) for token in ids]

    def read(self, inputs: Mapping[str, Any]) -> Prompt:
        """A prompt from the native model's own inputs."""
        return prompts.read(self, self.send(inputs))

    @torch.no_grad()
    def speak(self, prompt: Prompt, length: int) -> list[int]:
        """The first tokens of the model's own answer, at most `length`, the likeliest each time;
        fewer where it ends before (its end is not a word)."""
        with decoder.NATIVE_RUN, _plain_generation(self.module):
            sequence = self.module.generate(**prompt.inputs, max_new_tokens=length)
        ids = sequence[0, len(prompt.ids) :].tolist()
        return ids[:-1] if ids and ids[-1] in self.end_tokens else ids

    @property
    def end_tokens(self) -> list[int | None]:
        """What the model ends an answer with."""
        ends = self.module.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [ends]

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
        """Tensors on the model's device, pictures in its dtype; no labels, which are for
        training."""
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
        """A digest of the weights, for manifests: values of each, spread evenly over its rows and
        columns, since a whole model takes too long to read. Taken anew only when they changed."""
        named = list(self.module.named_parameters())
        state = weights_key(tensor for _, tensor in named)
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
            raise BadInput(
                "a question in words",
                "this model was wrapped without a processor",
                "wrap(module, processor), or use lvlm.read(inputs)",
            )


@contextmanager
def _plain_generation(module: Any) -> Iterator[None]:
    """Without what a checkpoint sets for `generate`: penalties, beams, sampling. Values that a call
    leaves out are taken from the module, so that its own settings must be set aside."""
    from transformers import GenerationConfig

    own = module.generation_config
    ends = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    module.generation_config = GenerationConfig(**ends, do_sample=False)
    try:
        yield
    finally:
        module.generation_config = own


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
    """A view of a transformers vision-language model that you have in memory, for everything in
    `sc.lvlm`. The module is put into eval mode and its parameters are frozen.

    processor   the model's own, which turns pictures and questions into its inputs. Without one,
                make prompts of native inputs: `lvlm.read(inputs)`
    name        what results call the model
    template    in place of the processor's chat template: a text with {image} and {question}
    inputs      native inputs to verify with, where there is no processor
    check       whether to verify that the view computes what the module computes
    """
    device_of(module)
    module.eval().requires_grad_(False)
    if template is not None:
        prompts.check_template(template)
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
        block.rotate = partial(rotate_rows, table=table)
        block.norm = norm_of_rows(native.input_layernorm)
        block.feed = chain(norm_of_rows(before), gated_feed(native.mlp), behind)
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
    """Open a vision-language model and verify its view; docs/models.md lists what works.

        lvlm = sc.lvlm.load("builtin:critters-llava")
        lvlm = sc.lvlm.load("hf:llava-hf/llava-1.5-7b-hf", device="cuda", dtype="bfloat16")

    spec        `builtin:NAME`, `hf:NAME-OR-FOLDER`, or a folder that transformers wrote
    device      such as "cuda"; None: where transformers puts it, which is the CPU unless quantised
    dtype       float32, bfloat16, float16 or float64; None: as stored (builtin models: float32)
    template    in place of the processor's chat template: a text with {image} and {question}
    check       whether to verify that the view computes what the native model computes
    """
    library, _, where = spec.partition(":")
    if library not in LIBRARIES or not where:
        if not Path(spec).is_dir():
            names = [f"{library}:NAME" for library in LIBRARIES]
            raise UnknownName("vision-language model", spec, names)
        library, where = "hf", spec
    if library == "builtin":
        where = str(_builtin(where))
    parse_device(device)
    kind = parse_dtype(dtype)
    module, processor = _open(where)
    default = torch.float32 if library == "builtin" else None  # builtin files hold half precision
    if _quantised(module.config):  # stays as it is stored, where its library put it
        if dtype is not None:
            raise BadOption("dtype", dtype, "no value: this model is quantised and stays as stored")
    else:
        module.to(device=device, dtype=kind or default)
    return wrap(module, processor, name=spec, template=template, check=check)


def _builtin(name: str) -> Path:
    folder = ZOO / name
    if (folder / "config.json").is_file():
        return folder
    if name.startswith("critters-llava"):
        make = f"Make it with `python -m tools.critters {name} --out DIR`, then name DIR/{name}"
        raise DataMissing(f"builtin:{name}", "this copy of the package does not hold it", make)
    names = [path.parent.name for path in ZOO.glob("*/config.json")]
    raise UnknownName("builtin vision-language model", name, names)


def calibration_critters(count: int = CALIBRATION, *, size: int = 96) -> list[Image.Image]:
    """Calibration pictures for the embedded models: `count` Critters, every creature on every
    background, a third of them in each drawing style."""
    from seecause import critters
    from seecause.critters.rendering import STYLES
    from seecause.data.images import to_pil

    styles = STYLES
    latents = critters.draw("balanced", "train", count, start=_START)
    images = [
        critters.render(rows, size=size, style=style).image
        for style, rows in zip(styles, latents.split(-(-count // len(styles))), strict=False)
    ]
    return [to_pil(image) for image in torch.cat(images)]


def _open(where: str) -> tuple[Any, Any]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    try:
        module, processor = fetched(
            f"hf:{where}",
            lambda: (
                pretrained_model(AutoModelForImageTextToText, where, dtype="auto"),
                pretrained(AutoProcessor, where),
            ),
            remedy="give a name or folder of transformers",
        )
    except ImportError as lacking:
        reason = " ".join(str(lacking).split())
        raise DataMissing(
            f"hf:{where}",
            f"what reads its weights is not installed ({reason})",
            "Install it, or give the model in float32 or half precision",
        ) from lacking
    readers = getattr(module.config.text_config, "image_readers", None)
    return (decoder.restrict(module) if readers else module), processor


def _quantised(config: Any) -> bool:
    """Whether weights were stored in fewer bits than they are computed with."""
    return getattr(config, "quantization_config", None) is not None
