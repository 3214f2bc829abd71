"""Networks as their users write them, which nobody wrote for this project; `# refused` marks the line that is named."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

B = 8


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class LlamaRotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        position_ids_expanded = position_ids[:, None, :].float()
        freqs = (inv_freq_expanded @ position_ids_expanded).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(dtype=x.dtype), emb.sin().to(dtype=x.dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def repeat_kv(hidden_states, n_rep):
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


class LlamaAttention(nn.Module):
    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, hidden_states, cos, sin, mask):
        bsz, q_len, _ = hidden_states.size()
        q = self.q_proj(hidden_states).view(bsz, q_len, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(bsz, q_len, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(bsz, q_len, self.kv_heads, self.head_dim).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v = repeat_kv(k, self.heads // self.kv_heads), repeat_kv(v, self.heads // self.kv_heads)
        weights = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim) + mask
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        out = torch.matmul(weights, v).transpose(1, 2).contiguous().reshape(bsz, q_len, -1)
        return self.o_proj(out)


class LlamaLayer(nn.Module):
    def __init__(self, hidden, heads, kv_heads, ffn):
        super().__init__()
        self.self_attn = LlamaAttention(hidden, heads, kv_heads)
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)
        self.input_layernorm = LlamaRMSNorm(hidden)
        self.post_attention_layernorm = LlamaRMSNorm(hidden)

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        residual = x
        x = self.post_attention_layernorm(x)
        return residual + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaForCausalLM(nn.Module):
    def __init__(self, vocab=32, hidden=16, layers=2, heads=4, kv_heads=2, ffn=24):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList([LlamaLayer(hidden, heads, kv_heads, ffn) for _ in range(layers)])
        self.norm = LlamaRMSNorm(hidden)
        self.rotary_emb = LlamaRotaryEmbedding(hidden // heads)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids, labels):
        x = self.embed_tokens(input_ids)
        n = input_ids.shape[1]
        position_ids = torch.arange(n, device=x.device).unsqueeze(0)
        mask = torch.full((n, n), torch.finfo(x.dtype).min, device=x.device, dtype=x.dtype).triu(1)
        cos, sin = self.rotary_emb(x, position_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        logits = self.lm_head(self.norm(x))
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        shift_logits, shift_labels = shift_logits.view(-1, logits.size(-1)), shift_labels.view(-1)
        return F.cross_entropy(shift_logits, shift_labels)  # refused with 2 microbatches: llama_padded


def llama():
    ids = torch.randint(0, 32, (B, 6))
    return LlamaForCausalLM(), (ids, ids.clone())


def llama_padded():
    ids = torch.randint(0, 32, (B, 6))
    labels = ids.clone()
    labels[:3, 2:] = -100
    return LlamaForCausalLM(), (ids, labels)


class ResNetBlock(nn.Module):
    def __init__(self, c_in, c_out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.down = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))  # refused with 2 microbatches
        out = self.bn2(self.conv2(out))
        out += self.down(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.blocks = nn.Sequential(ResNetBlock(3, 4), ResNetBlock(4, 8, 2))
        self.fc = nn.Linear(8, classes)

    def forward(self, image, label):
        x = self.blocks(image)
        x = F.adaptive_avg_pool2d(x, 1)
        x = torch.flatten(x, 1)
        return F.cross_entropy(self.fc(x), label)


def resnet():
    return ResNet(), (torch.randn(B, 3, 8, 8), torch.randint(0, 4, (B,)))


class ResNetGroupNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.fc = nn.Linear(4 * 16, 4)

    def forward(self, image, label):
        x = F.max_pool2d(F.relu(self.norm(self.conv1(image))), 2)
        x = F.gelu(self.conv2(x))
        return F.cross_entropy(self.fc(x.flatten(1)), label, label_smoothing=0.1)


def group_norm_cnn():
    return ResNetGroupNorm(), (torch.randn(B, 3, 8, 8), torch.randint(0, 4, (B,)))


class LSTMTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.out = nn.Linear(8, 5)

    def forward(self, tokens, tags):
        h, _ = self.lstm(self.emb(tokens))
        return F.cross_entropy(self.out(h).transpose(1, 2), tags)


def lstm():
    return LSTMTagger(), (torch.randint(0, 20, (B, 4)), torch.randint(0, 5, (B, 4)))


class GRUByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, series, target):
        h = torch.zeros(series.shape[0], 6, dtype=series.dtype)
        for t in range(series.shape[1]):
            h = self.cell(series[:, t], h)
        return F.mse_loss(self.out(h).squeeze(-1), target)


def gru():
    return GRUByHand(), (torch.randn(B, 3, 4), torch.randn(B))


class VAE(nn.Module):
    """The noise is an input, so that a step can be repeated."""

    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(12, 8)
        self.mu, self.logvar = nn.Linear(8, 3), nn.Linear(8, 3)
        self.dec = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 12))

    def forward(self, x, eps):
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.exp(0.5 * logvar) * eps
        recon = F.binary_cross_entropy_with_logits(self.dec(z), x, reduction="none").sum(-1).mean()
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=-1).mean()
        return recon + kl


def vae():
    return VAE(), (torch.rand(B, 12), torch.randn(B, 3))


class VAESampled(VAE):
    def forward(self, x, eps):
        return super().forward(x, torch.randn_like(eps))  # refused


def vae_sampled():
    return VAESampled(), (torch.rand(B, 12), torch.randn(B, 3))


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.text = nn.Linear(12, 8), nn.Linear(10, 8)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        i = F.normalize(self.visual(image), dim=-1)
        t = F.normalize(self.text(text), dim=-1)
        logits = self.logit_scale.exp() * i @ t.t()  # refused with 2 microbatches
        labels = torch.arange(logits.shape[0], device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def clip():
    return CLIP(), (torch.randn(B, 12), torch.randn(B, 10))


class GAN(nn.Module):
    """Both losses in one: that of the discriminator sees the picture detached."""

    def __init__(self):
        super().__init__()
        self.gen = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 6), nn.Tanh())
        self.disc = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, real, z):
        fake = self.gen(z)
        d_loss = F.softplus(-self.disc(real)).mean() + F.softplus(self.disc(fake.detach())).mean()
        return d_loss + 0.5 * F.softplus(-self.disc(fake)).mean()


def gan():
    return GAN(), (torch.randn(B, 6), torch.randn(B, 4))


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.target_q = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, state, action, reward, next_state, done):
        q = self.q(state).gather(1, action.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = self.q(next_state).argmax(1, keepdim=True)
            future = self.target_q(next_state).gather(1, best).squeeze(1)
            target = reward + 0.99 * future * (1.0 - done)
        return F.smooth_l1_loss(q, target)


def dqn():
    return DQN(), (
        torch.randn(B, 4),
        torch.randint(0, 3, (B,)),
        torch.randn(B),
        torch.randn(B, 4),
        (torch.arange(B) % 3 == 0).float(),
    )


class PPO(nn.Module):
    """Advantages are normed over the batch, as most do."""

    def __init__(self):
        super().__init__()
        self.pi, self.v = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, obs, act, old_logp, ret):
        logp = F.log_softmax(self.pi(obs), -1).gather(1, act[:, None])[:, 0]
        value = self.v(obs)[:, 0]
        adv = ret - value.detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)  # refused with 2 microbatches
        ratio = (logp - old_logp).exp()
        clipped = torch.clamp(ratio, 0.8, 1.2) * adv
        return -torch.min(ratio * adv, clipped).mean() + 0.5 * (value - ret).pow(2).mean()


def ppo():
    return PPO(), (torch.randn(B, 4), torch.randint(0, 3, (B,)), -torch.rand(B), torch.randn(B))


class TiedLM(nn.Module):
    def __init__(self, vocab=24, d=8, n=5):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(n, d)
        self.attn = nn.MultiheadAttention(d, 2, batch_first=True)
        self.ln = nn.LayerNorm(d)
        self.register_buffer("mask", torch.triu(torch.full((n, n), float("-inf")), 1))

    def forward(self, idx, target):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        y = self.ln(x)
        x = x + self.attn(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        logits = x @ self.wte.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def tied_lm():
    return TiedLM(), (torch.randint(0, 24, (B, 5)), torch.randint(0, 24, (B, 5)))


class TopKMoE(nn.Module):
    """Experts run on the tokens that chose them."""

    def __init__(self, d=8, experts=3, k=2, balance=0.0):
        super().__init__()
        self.gate = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 12), nn.GELU(), nn.Linear(12, d)) for _ in range(experts)
        )
        self.k, self.balance = k, balance

    def forward(self, x, target):
        probs = self.gate(x).softmax(-1)
        topv, topi = probs.topk(self.k, dim=-1)
        topv = topv / topv.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            weight = (topv * (topi == e)).sum(-1, keepdim=True)
            out = out + weight * expert(x)
        loss = F.mse_loss(out, target)
        if self.balance:
            f = F.one_hot(topi, len(self.experts)).to(x.dtype).sum(2).mean((0, 1))
            p = probs.mean((0, 1))
            loss = loss + self.balance * (f * p).sum()  # refused with 2 microbatches: moe_balanced
        return loss


def moe():
    return TopKMoE(), (torch.randn(B, 3, 8), torch.randn(B, 3, 8))


def moe_balanced():
    return TopKMoE(balance=0.1), (torch.randn(B, 3, 8), torch.randn(B, 3, 8))


class SparseMoE(nn.Module):
    """Mixtral's loop over the tokens of each expert: shapes depend on the data."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = torch.where(choice == e)[0]  # refused
            out.index_add_(0, rows, expert(x[rows]))
        return out.square().mean()


def sparse_moe():
    return SparseMoE(), (torch.randn(B, 8),)


class DoubleConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1),
            nn.InstanceNorm2d(o, affine=True),
            nn.ReLU(inplace=True),
            nn.Conv2d(o, o, 3, 1, 1),
        )

    def forward(self, x):
        return self.net(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1, self.d2, self.u1 = DoubleConv(1, 4), DoubleConv(4, 8), DoubleConv(12, 4)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x, mask):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        b = F.interpolate(b, scale_factor=2, mode="nearest")
        y = self.out(self.u1(torch.cat([a, b], 1)))
        prob = torch.sigmoid(y)
        dice = 1 - (2 * (prob * mask).sum((1, 2, 3)) + 1) / (prob.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
        return F.binary_cross_entropy_with_logits(y, mask) + dice.mean()


def unet():
    return UNet(), (torch.randn(B, 1, 8, 8), (torch.rand(B, 1, 8, 8) > 0.5).float())


class BatchDice(UNet):
    def forward(self, x, mask):
        prob = torch.sigmoid(self.out(self.d1(x)))
        return 1 - (2 * (prob * mask).sum() + 1) / (prob.sum() + mask.sum() + 1)  # refused with 2 microbatches


def batch_dice():
    return BatchDice(), (torch.randn(B, 1, 4, 4), (torch.rand(B, 1, 4, 4) > 0.5).float())


class TextBag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 6, mode="mean")
        self.fc = nn.Linear(6, 3)

    def forward(self, words, label):
        bag = self.bag(words)  # refused
        return F.cross_entropy(self.fc(bag), label)


def embedding_bag():
    return TextBag(), (torch.randint(0, 30, (B, 4)), torch.randint(0, 3, (B,)))


class EinsumAttention(nn.Module):
    def __init__(self, d=8, h=2):
        super().__init__()
        self.h = h
        self.qkv = nn.Parameter(torch.randn(3, h, d, d // h) * 0.3)
        self.o = nn.Parameter(torch.randn(h, d // h, d) * 0.3)

    def forward(self, x, keep):
        q, k, v = torch.einsum("bnd,thde->tbhne", x, self.qkv)
        att = torch.einsum("bhie,bhje->bhij", q, k) / (q.shape[-1] ** 0.5)
        att = att.masked_fill(~keep[:, None, None, :], float("-inf")).softmax(-1)
        y = torch.einsum("bhij,bhje,hed->bid", att, v, self.o)
        return (y - x).pow(2).mean()


def einsum_attention():
    keep = torch.ones(B, 5, dtype=torch.bool)
    keep[::2, 3:] = False
    return EinsumAttention(), (torch.randn(B, 5, 8), keep)


class MaskedEncoder(nn.Module):
    """The mean over each sample's own tokens, and then over samples."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x, keep, y):
        h = self.enc(x, src_key_padding_mask=~keep)
        m = keep.unsqueeze(-1).to(h.dtype)
        pooled = (h * m).sum(1) / m.sum(1).clamp(min=1)
        return F.mse_loss(self.head(pooled)[:, 0], y)


def masked_encoder():
    keep = torch.arange(5)[None] < torch.tensor([5, 3, 4, 2, 1, 5, 2, 3])[:, None]
    return MaskedEncoder(), (torch.randn(B, 5, 8), keep, torch.randn(B))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, 8))
        self.pos = nn.Parameter(torch.randn(1, 5, 8) * 0.02)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, image, label):
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return F.cross_entropy(self.head(self.block(x)[:, 0]), label)


def vit():
    return ViT(), (torch.randn(B, 3, 8, 8), torch.randint(0, 4, (B,)))


class ViTDropout(ViT):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, image, label):
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = self.drop(x)  # refused
        return F.cross_entropy(self.head(x.mean(1)), label)


def vit_dropout():
    return ViTDropout(), (torch.randn(B, 3, 8, 8), torch.randint(0, 4, (B,)))


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 4) for n in (10, 7, 5))
        self.bottom = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
        self.top = nn.Linear(4 + 6, 1)
        self.register_buffer("upper", torch.triu_indices(4, 4, 1))

    def forward(self, dense, sparse, click):
        x = self.bottom(dense)
        vectors = torch.stack([x] + [t(sparse[:, i]) for i, t in enumerate(self.tables)], 1)
        z = vectors @ vectors.transpose(1, 2)
        pairs = z[:, self.upper[0], self.upper[1]]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, pairs], 1))[:, 0], click)


def dlrm():
    return DLRM(), (torch.randn(B, 6), torch.randint(0, 5, (B, 3)), torch.randint(0, 2, (B,)).float())


class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(10, 8)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.register_buffer("alpha_bar", torch.cumprod(1 - torch.linspace(1e-3, 0.1, 10), 0))

    def forward(self, x, t, noise):
        a = self.alpha_bar[t].unsqueeze(-1)
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        snr = a / (1 - a)
        weight = torch.clamp(snr, max=5.0) / snr
        return (weight * (self.net(noisy + self.time(t)) - noise).pow(2)).mean()


def diffusion():
    return Diffusion(), (torch.randn(B, 8), torch.randint(0, 10, (B,)), torch.randn(B, 8))


class BYOL(nn.Module):
    """The target network is renewed in forward, without gradients."""

    def __init__(self):
        super().__init__()
        self.online, self.target, self.predictor = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 4)
        self.target.requires_grad_(False)

    def forward(self, one, two):
        with torch.no_grad():
            self.target.weight.mul_(0.9).add_(self.online.weight, alpha=0.1)  # refused
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(one)), self.target(two), dim=-1).mean()


def byol():
    return BYOL(), (torch.randn(B, 6), torch.randn(B, 6))


class SimSiam(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.h = nn.Linear(4, 4)

    def forward(self, one, two):
        z1, z2 = self.f(one), self.f(two)
        p1, p2 = self.h(z1), self.h(z2)
        first = -F.cosine_similarity(p1, z2.detach(), dim=-1).mean()
        return first / 2 - F.cosine_similarity(p2, z1.detach(), dim=-1).mean() / 2


def simsiam():
    return SimSiam(), (torch.randn(B, 6), torch.randn(B, 6))


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 4), nn.Linear(4, 6)
        self.codes = nn.Embedding(5, 4)

    def forward(self, x):
        z = self.enc(x)
        d = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codes.weight.t() + self.codes.weight.pow(2).sum(1)
        q = self.codes(d.argmin(1))
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        q = z + (q - z).detach()
        return F.mse_loss(self.dec(q), x) + loss


def vqvae():
    return VQVAE(), (torch.randn(B, 6),)


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 8) * 0.1), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x, y):
        return F.l1_loss(self.base(x) + (x @ self.a.t()) @ self.b.t() * 2.0, y)


def lora():
    return LoRA(), (torch.randn(B, 8), torch.randn(B, 8))


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)).requires_grad_(False)
        self.student = nn.Linear(6, 4)

    def forward(self, x, y):
        with torch.inference_mode(False), torch.no_grad():
            soft = F.softmax(self.teacher(x) / 2.0, dim=-1)
        logits = self.student(x)
        kd = F.kl_div(F.log_softmax(logits / 2.0, dim=-1), soft, reduction="batchmean") * 4.0
        return 0.5 * kd + 0.5 * F.cross_entropy(logits, y)


def distilled():
    return Distilled(), (torch.randn(B, 6), torch.randint(0, 4, (B,)))


class Graph(nn.Module):
    """Messages along the edges of each sample's own graph, given as a matrix."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.read = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, nodes, adjacency, y):
        a = adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)
        h = torch.relu(a @ self.w1(nodes))
        h = torch.relu(torch.bmm(a, self.w2(h)))
        return F.huber_loss(self.read(h.amax(1))[:, 0], y)


def graph():
    return Graph(), (torch.randn(B, 5, 4), (torch.rand(B, 5, 5) > 0.4).float(), torch.randn(B))


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**i) for i in range(2))
        self.skip = nn.ModuleList(nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 1)) for _ in range(2))
        self.out = nn.Conv1d(4, 4, 1)

    def forward(self, x):
        total, h = 0, x
        for conv, skip in zip(self.convs, self.skip, strict=True):
            pad = conv.dilation[0]
            a, b = conv(F.pad(h, (pad, 0))).chunk(2, 1)
            g = torch.tanh(a) * torch.sigmoid(b)
            h, total = h + g, total + skip(g)
        return (self.out(F.relu(total))[:, :, :-1] - x[:, :, 1:]).abs().mean()


def wavenet():
    return WaveNet(), (torch.randn(B, 4, 8),)


class Spectral(nn.Module):
    """Spectral norm renews its vectors at every forward, and reads them."""

    def __init__(self):
        super().__init__()
        self.f = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))

    def forward(self, x):
        return self.f(x).square().mean()  # refused


def spectral():
    return Spectral(), (torch.randn(B, 6),)


class FourierMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ff = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real  # refused
        return (self.ff(y) - x).square().mean()


def fourier():
    return FourierMixer(), (torch.randn(B, 4, 8),)


class SortedQuantiles(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 5)
        self.register_buffer("tau", torch.linspace(0.1, 0.9, 5))

    def forward(self, x, y):
        q = self.net(x).sort(-1).values
        e = y[:, None] - q
        return torch.maximum(self.tau * e, (self.tau - 1) * e).mean()


def quantiles():
    return SortedQuantiles(), (torch.randn(B, 6), torch.randn(B))


class Triplet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)

    def forward(self, a, p, n):
        return F.triplet_margin_loss(self.net(a), self.net(p), self.net(n))


def triplet():
    return Triplet(), (torch.randn(B, 6), torch.randn(B, 6), torch.randn(B, 6))


class S4(nn.Module):
    """A state space scanned in a loop, in complex numbers."""

    def __init__(self):
        super().__init__()
        self.log_a, self.b = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(4))
        self.c = nn.Linear(4, 1)

    def forward(self, u):
        a = torch.exp(-F.softplus(self.log_a))
        h, out = torch.zeros(u.shape[0], 4, dtype=u.dtype), []
        for t in range(u.shape[1]):
            h = a * h + self.b * u[:, t, None]
            out.append(self.c(h))
        return (torch.cat(out, 1)[:, :-1] - u[:, 1:]).pow(2).mean()


def state_space():
    return S4(), (torch.randn(B, 4),)


class Doubly(nn.Module):
    """Returns a dict, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x) -> dict[str, Any]:  # refused
        logits = self.f(x)
        return {"loss": logits.square().mean(), "logits": logits}


def dictionary():
    return Doubly(), (torch.randn(B, 4),)
