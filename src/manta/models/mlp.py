"""A multi-layer perceptron."""

from torch import Tensor, nn

from manta.limits import flat_size, positive, probability


class MLP(nn.Module):
    """Flatten, then Linear-ReLU-Dropout for each hidden width, then Linear. (N, *input_shape) -> (N, num_classes)."""

    def __init__(self, input_shape: list[int], num_classes: int, hidden: list[int], dropout: float = 0.0) -> None:
        super().__init__()
        positive(num_classes=num_classes, **{f"hidden[{i}]": width for i, width in enumerate(hidden)})
        probability(dropout=dropout)
        layers: list[nn.Module] = [nn.Flatten()]
        size = flat_size(input_shape)
        for width in hidden:
            layers += [nn.Linear(size, width), nn.ReLU(), nn.Dropout(dropout)]
            size = width
        self.layers = nn.Sequential(*layers, nn.Linear(size, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)
