"""A block of a diffusion transformer, as in diffusers: text and image tokens attend to each other,
and a vector of the time step modulates both. Text may be padded.

    python -m examples.dit_block

Attention is by FlashAttention's interface, in (B, N, H, D): the code only changes its import. In a
model of diffusers' own no code changes: README.md has the lines.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import flash_cute
from flash_cute.flash_attn import flash_attn_func


class Stream(nn.Module):
    """What text and image tokens each have of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def modulated(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class DiTBlock(nn.Module):
    """text (B, Nt, W), image (B, Ni, W), time (B, W) -> text, image."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.text, self.image = Stream(heads * head_dim), Stream(heads * head_dim)
        self.norm_q, self.norm_k = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, text_lengths: Tensor | None) -> Tensor:
        """q, k, v (B, N, H, D), the image's tokens first, so that the text's padding is last."""
        if text_lengths is None:
            return flash_attn_func(q, k, v)  # type: ignore[return-value]
        used = text_lengths + self.image_length
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_cute.forward(q, k, v, seqused_k=used)[0].transpose(1, 2)

    def forward(
        self, text: Tensor, image: Tensor, time: Tensor, text_lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`text_lengths` (B,) int32: what follows these tokens of text is padding."""
        self.image_length = image.shape[1]
        streams, xs = (self.image, self.text), [image, text]
        modulations = [
            stream.modulation(nn.functional.silu(time))[:, None].chunk(6, -1) for stream in streams
        ]
        qkv = torch.cat(
            [
                stream.qkv(stream.modulated(x, *mod[:2]))
                for stream, x, mod in zip(streams, xs, modulations, strict=True)
            ],
            1,
        )
        q, k, v = qkv.unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        out = self.attention(self.norm_q(q), self.norm_k(k), v, text_lengths).flatten(2)
        outs = out.split([x.shape[1] for x in xs], 1)
        results = []
        for stream, x, each, mod in zip(streams, xs, outs, modulations, strict=True):
            x = x + mod[2] * stream.proj(each)
            results.append(x + mod[5] * stream.mlp(stream.modulated(x, *mod[3:5])))
        return results[1], results[0]


class PlainDiTBlock(DiTBlock):
    """The same by PyTorch's own attention."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, text_lengths: Tensor | None) -> Tensor:
        mask = None
        if text_lengths is not None:
            keys = torch.arange(k.shape[1], device=k.device)
            mask = (keys < text_lengths[:, None] + self.image_length)[:, None, None]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def main(device: str = "cuda" if torch.cuda.is_available() else "cpu") -> int:
    """Compares the two on random numbers."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    block, plain = (kind(4, 32).to(device, dtype) for kind in (DiTBlock, PlainDiTBlock))
    plain.load_state_dict(block.state_dict())
    text, image, time = (
        torch.randn(shape, device=device, dtype=dtype)
        for shape in ((2, 20, 128), (2, 64, 128), (2, 128))
    )
    lengths = torch.tensor([20, 7], dtype=torch.int32, device=device)
    error = max(
        float((x - right)[:, :7].detach().abs().max())
        for given in (None, lengths)
        for x, right in zip(
            block(text, image, time, given), plain(text, image, time, given), strict=True
        )
    )
    right = error < (0.1 if device == "cuda" else 1e-4)
    print(
        f"largest difference from PyTorch's attention: {error:.1e}: {'right' if right else 'WRONG'}"
    )
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
