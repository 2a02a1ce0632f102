"""ResNet-18 for small images."""

from torch import nn
from torchvision import models

from manta.limits import image_shape, positive


def resnet18(input_shape: list[int], num_classes: int) -> nn.Module:
    """torchvision's ResNet-18 with the stem for small images: 3x3 convolution of stride 1, no max-pooling.

    (N, C, H, W) -> (N, num_classes). He et al. 2015, arXiv:1512.03385; the stem is the one of its CIFAR
    experiments (section 4.2). Batch normalisation needs more than one value a channel in training, so images
    of at most 8x8 need batches of at least 2.
    """
    channels, _, _ = image_shape(input_shape)
    positive(num_classes=num_classes)
    model = models.resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model
