"""What users hold: a native vision-language model, its decoder named and split."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from seecause.errors import BadOption, BadPrompt
from seecause.lvlm import prompt as prompts
from seecause.lvlm.prompt import Prompt
from seecause.models.block import Block
from seecause.models.decoder import Decoder
from seecause.types import wide_dtype

_SAMPLED = 1024  # values of each weight that the fingerprint reads
_STEPS = (
    0.7548776662466927,
    0.5698402909980532,
)  # 1 / r and 1 / r^2, r^3 = r + 1: turns of these shares fill a square evenly


@dataclass(eq=False, kw_only=True, repr=False)
class LVLM:
    """A view of a native vision-language model. `prompt` turns a picture and a question into what
    its decoder sees."""

    module: Any
    decoder: Decoder
    name: str
    processor: Any = None
    template: str | None = None  # with {image} and {question}; None: the processor's chat template

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
        return (
            f"LVLM({self.name!r}, {self.family}, {shape}, {self.device},"
            f" {str(self.dtype).removeprefix('torch.')})"
        )

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
            said = (
                prompts.answer_ids(self, image, text, answer) if isinstance(answer, str) else answer
            )
            inputs = prompts.extended(inputs, said)
        return prompts.read(self, inputs, size=(image.height, image.width))

    def answer_ids(self, image: Image.Image, question: str, answer: str) -> list[int]:
        """The tokens of an answer as they would follow the question."""
        self._need_processor()
        return prompts.answer_ids(
            self, image, prompts.render(self.processor, question, self.template), answer
        )

    def read(self, inputs: Mapping[str, Any]) -> Prompt:
        """A prompt from the native model's own inputs."""
        return prompts.read(self, self.send(inputs))

    @torch.no_grad()
    def speak(self, prompt: Prompt, length: int) -> list[int]:
        """The first tokens of the model's own answer, at most `length`, the likeliest each time;
        fewer where it ends before (its end is not a word)."""
        made = self.module.generate(
            **prompt.inputs,
            max_new_tokens=length,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        said, ends = made[0, len(prompt.ids) :].tolist(), self.module.generation_config.eos_token_id
        ended = said and said[-1] in (ends if isinstance(ends, list) else [ends])
        return said[:-1] if ended else said

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
        sent = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        return {
            name: (
                value.to(self.dtype)
                if isinstance(value, Tensor) and value.is_floating_point()
                else value
            )
            for name, value in sent.items()
        }

    def pieces(self, ids: Tensor) -> tuple[str, ...]:
        """Tokens as readable pieces; numbers where there is no tokenizer."""
        tokenizer = getattr(self.processor, "tokenizer", None)
        return tuple(str(i) if tokenizer is None else tokenizer.decode([i]) for i in ids.tolist())

    def fingerprint(self) -> str:
        """A digest of the weights, for manifests: values of each, spread evenly over its rows and
        columns, since a whole model takes too long to read."""
        named = list(self.module.named_parameters())
        sampled = [
            _spread(tensor.detach(), _SAMPLED).to(self.device).double() for _, tensor in named
        ]
        shapes = repr([(name, list(tensor.shape)) for name, tensor in named])
        return hashlib.sha256(
            shapes.encode() + torch.cat(sampled).cpu().numpy().tobytes()
        ).hexdigest()[:16]

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
    turns = (
        torch.arange(count, dtype=torch.float64)[:, None]
        * torch.tensor(_STEPS, dtype=torch.float64)
        % 1
    )
    row, column = (turns * torch.tensor(table.shape)).long().to(values.device).unbind(dim=1)
    return table[row, column]
