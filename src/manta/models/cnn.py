"""A small convolutional network."""

from torch import Tensor, nn

from manta.limits import image_shape, positive, probability


class CNN(nn.Module):
    """Conv3x3-ReLU-MaxPool2 for each width, then one hidden layer. (N, C, H, W) -> (N, num_classes).

    No batch statistics: the loss curve does not depend on how a batch is split over workers.
    """

    def __init__(
        self,
        input_shape: list[int],
        num_classes: int,
        channels: list[int],
        hidden: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        size, height, width = image_shape(input_shape)
        positive(num_classes=num_classes, hidden=hidden, **{f"channels[{i}]": c for i, c in enumerate(channels)})
        probability(dropout=dropout)
        shrink = 2 ** len(channels)
        if min(height, width) < shrink:
            raise ValueError(
                f"channels={list(channels)} halves the image {len(channels)} times, too often for "
                f"input_shape={list(input_shape)}"
            )
        layers: list[nn.Module] = []
        for widened in channels:
            layers += [nn.Conv2d(size, widened, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            size = widened
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(size * (height // shrink) * (width // shrink), hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.features(inputs))
