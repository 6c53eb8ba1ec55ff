"""AmoebaNet-D as a plain PyTorch module, for `benchmarks/max_batch.py`: a convolutional model whose cells skip cells.

Source: Real et al. 2019, "Regularized Evolution for Image Classifier Architecture Search" (arXiv 1802.01548), with the
genotype and the sizes of torchgpipe's experiments (18 normal cells, 256 filters, images of 224 x 224, 1,000 classes).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

NORMAL = (
    (1, "conv_1x1"), (1, "max_3x3"), (1, "none"), (0, "conv_1x7_7x1"), (0, "conv_1x1"), (0, "conv_1x7_7x1"),
    (2, "max_3x3"), (2, "none"), (1, "average_3x3"), (5, "conv_1x1"),
)  # fmt: skip
"""Pairs of operations (the state each reads, and its name); a pair's sum is the next state."""
NORMAL_RESULT = (0, 3, 4, 6)
REDUCTION = (
    (0, "max_2x2"), (0, "max_3x3"), (2, "none"), (1, "conv_3x3"), (2, "conv_1x7_7x1"), (2, "max_3x3"), (3, "none"),
    (1, "max_2x2"), (2, "average_3x3"), (3, "conv_1x1"),
)  # fmt: skip
REDUCTION_RESULT = (4, 5, 6)
_NARROW = 4
"""Wide convolutions work on so many times fewer channels."""


def conv(
    before: int, after: int, size: int | tuple[int, int], stride: int | tuple[int, int] = 1
) -> nn.Sequential:
    """Activation, convolution that keeps the image's size (but for strides), normalisation."""
    pad = size // 2 if isinstance(size, int) else (size[0] // 2, size[1] // 2)
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(before, after, size, stride, pad, bias=False), nn.BatchNorm2d(after)
    )


class Halved(nn.Module):
    """Two strided convolutions of the image and of the image shifted by a pixel, side by side."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after // 2, 1, 2, bias=False)
        self.second = nn.Conv2d(before, after - after // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, image: Tensor) -> Tensor:
        image = functional.relu(image)
        shifted = functional.pad(image, (0, 1, 0, 1))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.first(image), self.second(shifted)], 1))


def operation(name: str, channels: int, stride: int) -> nn.Module:
    narrow = channels // _NARROW
    match name:
        case "none":
            return nn.Identity() if stride == 1 else Halved(channels, channels)
        case "average_3x3":
            return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        case "max_2x2":
            return nn.MaxPool2d(2, stride)
        case "max_3x3":
            return nn.MaxPool2d(3, stride, 1)
        case "conv_1x1":
            return conv(channels, channels, 1, stride)
        case "conv_3x3":
            return nn.Sequential(
                conv(channels, narrow, 1), conv(narrow, narrow, 3, stride), conv(narrow, channels, 1)
            )
        case "conv_1x7_7x1":
            return nn.Sequential(
                conv(channels, narrow, 1),
                conv(narrow, narrow, (1, 7), (1, stride)),
                conv(narrow, narrow, (7, 1), (stride, 1)),
                conv(narrow, channels, 1),
            )
    raise ValueError(name)


class Cell(nn.Module):
    """Five pairs of operations on the results of the two cells before."""

    def __init__(self, before: int, last: int, channels: int, reduces: bool, follows_reduction: bool) -> None:
        super().__init__()
        genotype, self.result = (REDUCTION, REDUCTION_RESULT) if reduces else (NORMAL, NORMAL_RESULT)
        self.first = Halved(before, channels) if follows_reduction else conv(before, channels, 1)
        self.second = conv(last, channels, 1)
        self.sources = [source for source, _ in genotype]
        self.operations = nn.ModuleList(
            operation(name, channels, 2 if reduces and source < 2 else 1) for source, name in genotype
        )
        self.channels = channels * len(self.result)

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        states = [self.first(before), self.second(last)]
        for pair in range(0, len(self.sources), 2):
            one, other = (self.operations[index](states[self.sources[index]]) for index in (pair, pair + 1))
            states.append(one + other)
        return torch.cat([states[index] for index in self.result], 1)


class AmoebaNetD(nn.Module):
    def __init__(self, num_cells: int = 18, num_filters: int = 256, num_classes: int = 1000) -> None:
        super().__init__()
        channels = num_filters // 4
        self.stem = nn.Conv2d(3, channels, 3, 2, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(channels)
        self.cells = nn.ModuleList()
        before = last = channels
        after_reduction = False
        third = num_cells // 3
        reductions = {0, 1, 2 + third, 3 + 2 * third}
        for index in range(num_cells + len(reductions)):
            reduces = index in reductions
            channels = channels * 2 if reduces else channels
            cell = Cell(before, last, channels, reduces, after_reduction)
            before, last, after_reduction = last, cell.channels, reduces
            self.cells.append(cell)
        self.head = nn.Linear(last, num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        before = last = self.stem_norm(self.stem(images))
        for cell in self.cells:
            before, last = last, cell(before, last)
        return functional.cross_entropy(self.head(last.mean((2, 3))), labels)


def amoebanet_d(
    microbatch_size: int,
    dtype: torch.dtype,
    num_cells: int = 18,
    num_filters: int = 256,
    image_size: int = 224,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, whose output is its loss, and inputs that show shapes."""
    model = AmoebaNetD(num_cells, num_filters)
    images = torch.zeros(microbatch_size, 3, image_size, image_size)
    return model, {"images": images, "labels": torch.zeros(microbatch_size, dtype=torch.int64)}
