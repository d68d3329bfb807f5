"""iFAM networks as views, so that every method and metric works on them.

Two stages: what stage 1 decides are facts about tokens (models/block.py). They go into the
blocks of stage 2, and with them into keys, wherever a method puts those: in a blank's run, a hidden
patch stays hidden. The mask follows the pixels that a method changes; its gradient is not followed.

One stage (PDiscoFormer): a patch's share in every part depends on that patch alone, so its features
times its shares are a row, their mean over patches the part embeddings, and the votes a head.
"""

from __future__ import annotations

from torch import Tensor

from seecause.errors import NotDefined
from seecause.faithful.attention import reads_only
from seecause.faithful.net import IFAM
from seecause.faithful.stages import visible_tokens
from seecause.models.block import chain, hiding
from seecause.models.parts import Parts


def view_parts(net: IFAM) -> Parts:
    """The parts of an IFAM network; it must be in eval mode, as `sc.wrap` puts it."""
    return _one_stage(net) if net.stage2 is None else _two_stages(net)


def _two_stages(net: IFAM) -> Parts:
    stage = net.stage2
    assert stage is not None
    if net.options.gradient == "soft":
        reason = "every token is read a little, so none is hidden"
        raise NotDefined("a view of a soft mask", reason, "Use gradient='ste' or 'none'")
    tower = stage.tower.parts

    def visible(images: Tensor) -> Tensor:
        return visible_tokens(net.select(images), stage.prefix)  # [B, T]

    blocks = [hiding(block) for block in tower.blocks]
    for block, tap in zip(blocks, stage.taps, strict=True):
        block.native, block.holder = tap, block.native
    return Parts(
        family=f"iFAM on {tower.family}",
        embed=tower.embed,
        layout_at=tower.layout_at,
        blocks=blocks,
        norm=tower.norm,
        patch=tower.patch,
        native_tokens=lambda images: tower.norm(stage.tokens(images, reads_only(visible(images)))),
        preprocess=net.preprocess,
        pool="cls",
        head=chain(stage.fc_norm, stage.head),
        native_logits=lambda images: net(images, packed=False).logits,
        classes=net.class_names,
        fixed_size=tower.fixed_size,
        size=tower.size,
        facts=lambda images: ~visible(images)[..., None],
    )


def _one_stage(net: IFAM) -> Parts:
    tower, width = net.stage1.tower.parts, net.stage1.tower.width
    if net.options.eval_noise:
        reason = "the noise of a patch depends on its place"
        raise NotDefined("a view of PDiscoFormer with eval_noise", reason, "Use eval_noise=False")

    def shares(features: Tensor) -> Tensor:
        """Features [B, R, D] -> what each adds to every part, [B, R, (K + 1) D]."""
        _, maps = net.assign(features)  # [B, K + 1, R]
        return (maps.transpose(1, 2)[..., None] * features[:, :, None]).flatten(2)

    def head(pooled: Tensor) -> Tensor:
        embeddings = pooled.unflatten(-1, (net.parts + 1, width)).transpose(-1, -2)
        votes = net.votes(net.stage1.modulation(embeddings.flatten(0, -3)))
        return net.mean_vote(votes).unflatten(0, embeddings.shape[:-2])

    return Parts(
        family=f"PDiscoFormer on {tower.family}",
        embed=tower.embed,
        layout_at=tower.layout_at,
        blocks=tower.blocks,
        norm=lambda rows: shares(tower.norm(rows)),
        patch=tower.patch,
        native_tokens=lambda images: shares(tower.native_tokens(images)),
        preprocess=net.preprocess,
        pool="mean",
        head=head,
        native_logits=lambda images: net(images).logits,
        classes=net.class_names,
        fixed_size=tower.fixed_size,
        size=tower.size,
    )
