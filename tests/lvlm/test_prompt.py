"""Prompts: what cannot be traced is refused in words."""

from types import SimpleNamespace

import pytest
import torch

from seecause.errors import BadInput, BadOption, DataMissing, UnsupportedModel
from seecause.lvlm import load, wrap
from seecause.lvlm.prompt import extended, render
from tests.families.lvlm import photo, tiny_lvlm
from tests.lvlm.scenes import QUESTION, scene


def test_text_rows_are_everything_after_the_picture():
    prompt = scene("internvl").engine.prompt
    assert prompt.pieces == ("</img>", "what", "is", "this", "?", "ASSISTANT", ":")
    assert (
        prompt.n_text == 7
        and prompt.embeddings.shape[1] == prompt.text.stop == prompt.image.stop + 7
    )


def test_bad_questions_and_pictures():
    lvlm = scene("llava").lvlm
    with pytest.raises(BadInput, match="empty question"):
        lvlm.prompt(photo((32, 32)), "  ")
    with pytest.raises(BadInput, match="one image"):
        lvlm.prompt(photo((32, 32)), "what is <image> this ?")
    with pytest.raises(BadOption, match="image="):
        lvlm.prompt([photo((32, 32)), photo((32, 32))], QUESTION)
    with pytest.raises(BadInput, match="answer"):
        lvlm.prompt(photo((32, 32)), QUESTION, "")


def test_sequences_that_cannot_be_traced():
    lvlm = scene("llava").lvlm
    inputs = dict(scene("llava").engine.prompt.inputs)
    ids, token = inputs["input_ids"], lvlm.module.config.image_token_id
    with pytest.raises(BadInput, match="without image tokens"):
        lvlm.read({**inputs, "input_ids": ids.masked_fill(ids == token, 5)})
    with pytest.raises(BadInput, match="ends with the image"):
        lvlm.read({name: t[:, :17] if name != "pixel_values" else t for name, t in inputs.items()})
    with pytest.raises(BadInput, match=r"input_ids .2, "):
        lvlm.read({name: torch.cat([t, t]) for name, t in inputs.items()})
    wide = scene("qwen2_vl")
    with pytest.raises(UnsupportedModel, match="8 image tokens are not known"):
        given = dict(wide.engine.prompt.inputs)
        wide.lvlm.read({**given, "image_grid_thw": given["image_grid_thw"].repeat(2, 1)})
    with pytest.raises(BadInput, match="processor"):
        wrap(lvlm.module, check=False).prompt(photo((32, 32)), QUESTION)


def test_padding_is_refused_in_words():
    """A hidden token would be seen here, and answers would be off without a word."""
    inputs = dict(scene("llava").engine.prompt.inputs)
    mask = inputs["attention_mask"].clone()
    mask[:, 0] = 0
    with pytest.raises(BadInput, match=r"with padding.*without padding"):
        scene("llava").lvlm.read({**inputs, "attention_mask": mask})


def test_a_sliding_window_shorter_than_the_prompt_is_refused(monkeypatch):
    lvlm = scene("llava").lvlm
    monkeypatch.setattr(lvlm.decoder, "window", 10)
    with pytest.raises(BadInput, match="sliding window holds 10"):
        lvlm.prompt(photo((32, 32)), QUESTION)
    length = len(scene("llava").engine.prompt.ids)
    monkeypatch.setattr(lvlm.decoder, "window", length)
    assert len(lvlm.prompt(photo((32, 32)), QUESTION).ids) == length
    monkeypatch.setattr(lvlm.decoder, "window", length - 1)
    with pytest.raises(BadInput, match=f"a prompt of {length} tokens"):
        lvlm.prompt(photo((32, 32)), QUESTION)


def test_a_model_that_computes_something_else_reads_no_prompt():
    lvlm = scene("llava").lvlm
    inputs = dict(scene("llava").engine.prompt.inputs)
    lvlm.module.train()
    try:
        with pytest.raises(BadOption, match="training mode"):
            lvlm.read(inputs)
    finally:
        lvlm.module.eval()
    with torch.autocast("cpu"), pytest.raises(BadOption, match="autocast"):
        lvlm.read(inputs)


def test_a_saved_model_is_loaded(tmp_path):
    native = tiny_lvlm("qwen2_vl", torch.float32)
    native.module.save_pretrained(tmp_path)
    native.processor.save_pretrained(tmp_path)
    lvlm = load(f"hf:{tmp_path}", dtype="float64")
    assert lvlm.dtype == torch.float64 and lvlm.prompt(photo((40, 56)), QUESTION).n_image == 8
    with pytest.raises(DataMissing):
        load(f"hf:{tmp_path / 'nowhere'}")


def test_a_prompt_is_written_by_its_template():
    chatty = SimpleNamespace(
        image_token="<image>",
        chat_template="own",
        apply_chat_template=lambda messages, **options: (messages, options),
    )
    messages, options = render(chatty, "Why?")
    content = [{"type": "image"}, {"type": "text", "text": "Why?"}]
    assert messages == [{"role": "user", "content": content}]
    assert options == {"add_generation_prompt": True, "tokenize": False}
    assert render(chatty, "Why?", "{question} | {image}") == "Why? | <image>"
    plain = SimpleNamespace(image_token="<image>")
    assert render(plain, "Why?") == "USER: <image>\nWhy? ASSISTANT:"


def test_tokens_that_follow_an_answer_are_words_that_all_may_see():
    inputs = {
        "input_ids": torch.tensor([[5, 6]]),
        "attention_mask": torch.ones(1, 2, dtype=torch.int32),
        "mm_token_type_ids": torch.tensor([[0, 1]]),
        "token_type_ids": torch.tensor([[1, 1]]),
        "pixel_values": torch.zeros(1, 3),
    }
    longer = extended(inputs, [8, 9])
    assert longer["input_ids"].tolist() == [[5, 6, 8, 9]]
    assert longer["attention_mask"].tolist() == [[1, 1, 1, 1]]
    assert longer["attention_mask"].dtype == torch.int32
    assert longer["mm_token_type_ids"].tolist() == [[0, 1, 0, 0]]
    assert longer["token_type_ids"].tolist() == [[1, 1, 0, 0]]
    assert longer["pixel_values"] is inputs["pixel_values"] and len(longer) == 5
