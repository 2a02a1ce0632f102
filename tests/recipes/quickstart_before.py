"""A script as tutorials have it: a model, two DataLoaders, a loop over epochs. One process, one device, no way back after a crash."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
training_data = TensorDataset(images[:1500], labels[:1500])
test_data = TensorDataset(images[1500:], labels[1500:])


def train(dataloader, model, loss_fn, optimizer):
    model.train()
    for x, y in dataloader:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test(dataloader, model, loss_fn):
    model.eval()
    size = len(dataloader.dataset)
    test_loss, correct = 0.0, 0.0
    with torch.no_grad():
        for x, y in dataloader:
            pred = model(x)
            test_loss += loss_fn(pred, y).item() * len(y)
            correct += (pred.argmax(1) == y).sum().item()
    return test_loss / size, correct / size


def main():
    train_dataloader = DataLoader(training_data, batch_size=64, shuffle=True)
    test_dataloader = DataLoader(test_data, batch_size=64)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for epoch in range(5):
        train(train_dataloader, model, loss_fn, optimizer)
        loss, accuracy = test(test_dataloader, model, loss_fn)
        print(f"Epoch {epoch + 1}: accuracy {accuracy:.3f}, loss {loss:.4f}")
    print("Done!")


if __name__ == "__main__":
    main()
