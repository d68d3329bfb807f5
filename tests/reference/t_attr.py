"""Transformer attribution, slowly: one picture through a timm ViT written out, and relevance back
through each operator with autograd.

After the authors' code: every rule is x * d(z)/dx applied to R / z, at one operator at a time.
"""

import torch
import torch.nn.functional as F


def divide(a, b):
    den = b.clamp(min=1e-9) + b.clamp(max=1e-9)
    den = den + den.eq(0).type(den.type()) * 1e-9
    return a / den * b.ne(0).type(b.type())


def leaf(x):
    return x.detach().clone().requires_grad_()


def linear_rule(layer, x, relevance):
    up, down = leaf(x.clamp(min=0)), leaf(x.clamp(max=0))
    z_up, z_down = (
        F.linear(up, layer.weight.clamp(min=0)),
        F.linear(down, layer.weight.clamp(max=0)),
    )
    share = divide(relevance, z_up + z_down).detach()
    return (
        up.detach() * torch.autograd.grad(z_up, up, share)[0]
        + down.detach() * torch.autograd.grad(z_down, down, share)[0]
    )


def matmul_rule(a, b, relevance):
    a, b = leaf(a), leaf(b)
    z = a @ b
    to_a, to_b = torch.autograd.grad(z, (a, b), divide(relevance, z).detach())
    return (a * to_a / 2).detach(), (b * to_b / 2).detach()


def add_rule(a, b, relevance):
    share = divide(relevance, a + b)
    a, b = a * share, b * share
    sizes = a.sum().abs() + b.sum().abs()
    to_a = divide(a.sum().abs(), sizes) * relevance.sum()
    to_b = divide(b.sum().abs(), sizes) * relevance.sum()
    return a * divide(to_a, a.sum()), b * divide(to_b, b.sum())


def forward(module, image):
    """Logits [C], and what every block computed. `module` is a timm VisionTransformer read from its
    class token."""
    h = module.norm_pre(module._pos_embed(module.patch_embed(image[None])))[0]  # [T, D]
    tapes = []
    for block in module.blocks:
        normed = block.norm1(h)
        q, k, v = (
            block.attn.qkv(normed).unflatten(-1, (3, block.attn.num_heads, -1)).permute(1, 2, 0, 3)
        )  # [H, T, dh]
        q, k = block.attn.q_norm(q), block.attn.k_norm(k)
        probs = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
        mixed = (probs @ v).transpose(0, 1).flatten(1)
        attended = block.ls1(block.attn.proj(mixed))
        middle = h + attended
        fed = block.norm2(middle)
        hidden = block.mlp.act(block.mlp.fc1(fed))
        out = block.ls2(block.mlp.fc2(hidden))
        tapes.append(
            dict(
                h=h,
                normed=normed,
                q=q,
                k=k,
                v=v,
                probs=probs,
                mixed=mixed,
                attended=attended,
                middle=middle,
                fed=fed,
                hidden=hidden,
                out=out,
            )
        )
        h = middle + out
    final = module.norm(h)
    return module.head(final[0]), final, tapes


def t_attr(module, image, label, *, start=0):
    """The map over all tokens [T], and the sum of relevance at the input of each block, first block
    first."""
    with torch.enable_grad():
        image = image.clone().requires_grad_()
        logits, final, tapes = forward(module, image)
        gradients = torch.autograd.grad(logits[label], [tape["probs"] for tape in tapes])
    tapes = [{name: x.detach() for name, x in tape.items()} for tape in tapes]
    relevance = torch.zeros_like(final)
    relevance[0] = linear_rule(
        module.head, final.detach()[0], F.one_hot(torch.tensor(label), len(logits)).to(final.dtype)
    )
    cams, sums = [], []
    for block, tape, gradient in reversed(list(zip(module.blocks, tapes, gradients, strict=True))):
        to_middle, to_out = add_rule(tape["middle"], tape["out"], relevance)
        to_hidden = linear_rule(block.mlp.fc2, tape["hidden"], to_out)
        to_middle = to_middle + linear_rule(block.mlp.fc1, tape["fed"], to_hidden)
        to_h, to_attended = add_rule(tape["h"], tape["attended"], to_middle)
        to_mixed = linear_rule(block.attn.proj, tape["mixed"], to_attended)
        to_heads = to_mixed.unflatten(-1, (block.attn.num_heads, -1)).transpose(0, 1)
        to_probs, to_v = matmul_rule(tape["probs"], tape["v"], to_heads)
        to_q, to_kt = matmul_rule(tape["q"], tape["k"].transpose(-1, -2), to_probs)
        packed = (
            torch.stack([to_q, to_kt.transpose(-1, -2), to_v]).permute(2, 0, 1, 3).flatten(1)
        )  # [T, 3 * H * dh]
        relevance = to_h + linear_rule(block.attn.qkv, tape["normed"], packed)
        cams.insert(0, (gradient * to_probs).clamp(min=0).mean(dim=0))
        sums.insert(0, relevance.sum())
    joint = torch.eye(len(final), dtype=final.dtype)
    for cam in cams[start:]:
        joint = joint + cam @ joint
    return joint[0], torch.stack(sums)
