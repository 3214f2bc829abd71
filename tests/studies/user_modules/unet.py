"""U-Net that segments discs and boxes in noisy pictures."""

import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH = 16
SIZE = 32
N_CLASSES = 3  # background, disc, box


class DoubleConv(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, c_out)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(x)), inplace=True)


class Up(nn.Module):
    def __init__(self, c_in, c_skip, c_out):
        super().__init__()
        self.up = nn.ConvTranspose2d(c_in, c_out, 2, stride=2)
        self.conv = DoubleConv(c_out + c_skip, c_out)

    def forward(self, x, skip):
        return self.conv(torch.cat([self.up(x), skip], dim=1))


class UNet(nn.Module):
    def __init__(self, widths=(12, 24, 48, 64)):
        super().__init__()
        self.stem = DoubleConv(1, widths[0])
        self.downs = nn.ModuleList([DoubleConv(a, b) for a, b in itertools.pairwise(widths)])
        rev = widths[::-1]
        self.ups = nn.ModuleList([Up(a, b, b) for a, b in itertools.pairwise(rev)])
        self.drop = nn.Dropout2d(0.1)
        self.out = nn.Conv2d(widths[0], N_CLASSES, 1)

    def forward(self, image, mask=None):
        x = self.stem(image)
        skips = []
        for down in self.downs:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        x = self.drop(x)
        for up in self.ups:
            x = up(x, skips.pop())
        return self.out(x)


class Shapes(torch.utils.data.Dataset):
    def __init__(self, n=2000):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng = torch.Generator().manual_seed(1000 + i)
        yy, xx = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        mask = torch.zeros(SIZE, SIZE, dtype=torch.long)
        for kind in (1, 2):
            cy, cx = torch.randint(6, SIZE - 6, (2,), generator=rng).tolist()
            r = torch.randint(4, 8, (1,), generator=rng).item()
            dy, dx = (yy - cy).abs(), (xx - cx).abs()
            inside = dy**2 + dx**2 <= r * r if kind == 1 else torch.maximum(dy, dx) <= r - 1
            mask[inside] = kind
        image = (mask > 0).float() - 0.4 * (mask == 2) + 0.2 * torch.randn(SIZE, SIZE, generator=rng)
        return {"image": image[None], "mask": mask}


def model():
    return UNet()


def data():
    return Shapes()


def loss(outputs, batch):
    mask = batch["mask"]
    ce = F.cross_entropy(outputs, mask)
    probs = outputs.softmax(1)
    onehot = F.one_hot(mask, N_CLASSES).permute(0, 3, 1, 2).to(probs.dtype)
    inter = (probs * onehot).sum((2, 3))
    dice = (2 * inter + 1) / (probs.sum((2, 3)) + onehot.sum((2, 3)) + 1)  # per sample and class
    return ce + (1 - dice).mean()


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.3)
