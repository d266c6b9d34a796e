"""Random blocks for points that are images or volumes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.dice import Dice, Shape, Step, block, weights


@block(3, 3, 3, 3)
def convolution(dice: Dice, shape: Shape) -> nn.Module:
    groups = dice.divisor(shape[0])
    padding = dice.one(0, 1, 1, "same")
    return nn.Conv2d(
        shape[0], groups * dice.one(1, 1, 2), dice.one(1, 2, 3, (2, 1), shape[1:]),
        stride=1 if padding == "same" else dice.one(1, 1, 2, (1, 2)), padding=padding,
        dilation=dice.one(1, 1, 2), groups=groups, bias=dice.chance(0.6),
        padding_mode=dice.one("zeros", "zeros", "zeros", "reflect", "replicate", "circular"),
    )  # fmt: skip


@block(3)
def separable_convolution(dice: Dice, shape: Shape) -> nn.Module:
    wide = shape[0] * dice.one(1, 2)
    depthwise = nn.Conv2d(shape[0], wide, 3, padding=1, groups=shape[0], bias=dice.chance(0.5))
    return nn.Sequential(
        depthwise, nn.BatchNorm2d(wide), nn.SiLU(), nn.Conv2d(wide, dice.size(), 1)
    )


@block(3)
def convnext(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.gain * self.down(F.gelu(self.up(h)))).permute(0, 3, 1, 2)

    wide, C = 2 * shape[0], shape[0]
    return Step(
        forward, depthwise=nn.Conv2d(C, C, 3, padding=1, groups=C), norm=nn.LayerNorm(C),
        up=nn.Linear(C, wide), down=nn.Linear(wide, C), gain=weights(C),
    )  # fmt: skip


@block(3)
def squeeze_and_excite(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        s = self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()
        return x * s

    hidden = dice.size()
    return Step(forward, down=nn.Conv2d(shape[0], hidden, 1), up=nn.Conv2d(hidden, shape[0], 1))


@block(3)
def residual_block(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.one(x)), inplace=True)
        h = self.two(h)
        h += x
        return h.sin_()

    C = shape[0]
    return Step(
        forward, one=nn.Conv2d(C, C, 3, padding=1, bias=False), norm=nn.BatchNorm2d(C),
        two=nn.Conv2d(C, C, 3, padding=1, groups=dice.divisor(C)),
    )  # fmt: skip


@block(3)
def transposed_convolution(dice: Dice, shape: Shape) -> nn.Module:
    groups, stride = dice.divisor(shape[0]), dice.one(1, 2)
    return nn.ConvTranspose2d(
        shape[0], groups * dice.one(1, 2), dice.one(2, 3), stride=stride, groups=groups,
        padding=dice.one(0, 1), output_padding=stride - 1, dilation=dice.one(1, 2),
        bias=dice.chance(0.6),
    )  # fmt: skip


@block(3)
def norm(dice: Dice, shape: Shape) -> nn.Module:
    C = shape[0]
    return dice.one(
        lambda: nn.BatchNorm2d(C, affine=dice.chance(0.8)),
        lambda: nn.InstanceNorm2d(C, affine=True, track_running_stats=dice.chance(0.3)),
        lambda: nn.GroupNorm(dice.divisor(C), C),
        lambda: nn.LayerNorm(shape[dice.one(0, 1, 2) :]),
        lambda: nn.RMSNorm(shape[-1]),
    )()


@block(3, 3)
def pooled(dice: Dice, shape: Shape) -> nn.Module:
    layer = dice.one(
        nn.MaxPool2d(2, padding=1), nn.AvgPool2d(2, padding=1), nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.LPPool2d(2, 2),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(scale_factor=2, mode="bicubic"),
        nn.Upsample(scale_factor=2), nn.LocalResponseNorm(2), nn.ReplicationPad2d(1),
        nn.CircularPad2d(1), nn.ZeroPad2d(1),
    )  # fmt: skip
    return Step(lambda self, x: self.layer(x * self.scale), layer=layer, scale=weights(shape[-1]))


@block(3)
def unpooled(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        h, index = F.max_pool2d(self.conv(x), 2, return_indices=True)
        return F.max_unpool2d(h * self.gain, index, 2)

    return Step(forward, conv=nn.Conv2d(shape[0], dice.size(), 1), gain=weights())


@block(3)
def shuffled_pixels(dice: Dice, shape: Shape) -> nn.Module:
    if dice.chance(0.5):
        return nn.Sequential(nn.Conv2d(shape[0], 4, 1), nn.PixelShuffle(2))
    return nn.Sequential(nn.Upsample(scale_factor=2), nn.PixelUnshuffle(2), nn.LazyConv2d(2, 1))


@block(3)
def shuffled_channels(dice: Dice, shape: Shape) -> nn.Module:
    C = shape[0]
    conv = nn.Conv2d(C, C, 1, groups=dice.divisor(C))
    return nn.Sequential(conv, nn.ChannelShuffle(dice.divisor(C)), nn.Conv2d(C, dice.size(), 1))


@block(3)
def patches(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        columns = F.unfold(x, 2, padding=1)
        h = self.inner(columns.transpose(1, 2))
        if not back:
            return h
        return F.fold(h.transpose(1, 2), tuple(s + 2 for s in x.shape[2:]), 2)

    back = dice.chance(0.5)
    return Step(forward, inner=nn.Linear(4 * shape[0], 4 * dice.one(1, 2)))


@block(3)
def spatial_transformer(dice: Dice, shape: Shape) -> nn.Module:
    pad = dice.one("zeros", "border", "reflection")

    def forward(self: Step, x: Tensor) -> Tensor:
        theta = 0.3 * self.locate(x.flatten(1)).reshape(-1, 2, 3) + torch.eye(2, 3, dtype=x.dtype)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode=pad, align_corners=False)

    return Step(forward, locate=nn.Linear(shape[0] * shape[1] * shape[2], 6))


@block(3)
def vision_patches(dice: Dice, shape: Shape) -> nn.Module:
    width = dice.size(2)

    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1)
        return h + self.attend(h, h, h, need_weights=False)[0]

    return Step(
        forward, patch=nn.Conv2d(shape[0], width, 2, stride=2), token=weights(1, 1, width),
        attend=nn.MultiheadAttention(width, 1, batch_first=True),
    )  # fmt: skip


@block(3)
def axes_moved(dice: Dice, shape: Shape) -> nn.Module:
    C = shape[0]
    kind = dice.one("last", "columns", "rows", "flat")

    def forward(self: Step, x: Tensor) -> Tensor:
        if kind == "last":
            return self.inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if kind == "columns":
            return self.inner(x.permute(0, 3, 2, 1).reshape(-1, C)).reshape(len(x), -1)
        if kind == "rows":
            return self.inner(x.permute(2, 0, 3, 1)).permute(1, 0, 2, 3)
        return self.inner(x.flatten(2).transpose(1, 2))

    return Step(forward, inner=nn.Linear(C, dice.size()))


@block(3)
def local_weights(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        return torch.einsum("bchw,hwcd->bdhw", x, self.W)

    return Step(forward, W=weights(*shape[1:], shape[0], dice.size()))


@block(4, 4)
def volume_convolution(dice: Dice, shape: Shape) -> nn.Module:
    groups = dice.divisor(shape[0])
    return nn.Conv3d(
        shape[0], groups * dice.one(1, 2), dice.one(1, 2, (1, 2, 1), shape[1:]),
        stride=dice.one(1, 2), padding=dice.one(0, 1), groups=groups, bias=dice.chance(0.6),
        padding_mode=dice.one("zeros", "zeros", "replicate", "circular"),
    )  # fmt: skip


@block(4)
def volume_layer(dice: Dice, shape: Shape) -> nn.Module:
    C = shape[0]
    return dice.one(
        lambda: nn.ConvTranspose3d(C, dice.size(), 2, stride=dice.one(1, 2)),
        lambda: nn.BatchNorm3d(C), lambda: nn.InstanceNorm3d(C, affine=True),
        lambda: nn.Sequential(nn.Conv3d(C, 2, 1), nn.MaxPool3d(2, padding=1)),
        lambda: nn.Sequential(nn.Conv3d(C, 2, 1), nn.AvgPool3d(2, padding=1)),
        lambda: nn.Sequential(nn.Conv3d(C, 2, 1), nn.AdaptiveAvgPool3d(1)),
        lambda: nn.Sequential(nn.Conv3d(C, 2, 1), nn.Upsample(scale_factor=2, mode="trilinear")),
    )()  # fmt: skip


@block(4)
def frames_in_the_batch(dice: Dice, shape: Shape) -> nn.Module:
    def forward(self: Step, x: Tensor) -> Tensor:
        h = self.conv(x.transpose(1, 2).flatten(0, 1))
        return h.reshape(len(x), -1)

    return Step(forward, conv=nn.Conv2d(shape[0], dice.size(), 2, padding=1))
