"""PyTorch's transformer layers, made with the drop-in: the originals' arguments and state_dict."""

from __future__ import annotations

from typing import Any

from torch import nn

from multihead.compat.torch_nn.replace import replace


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """nn.TransformerEncoderLayer, whose `self_attn` is the drop-in. It takes the same arguments.

    >>> import torch
    >>> TransformerEncoderLayer(16, 2, batch_first=True)(torch.randn(3, 5, 16)).shape
    torch.Size([3, 5, 16])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replace(self, inplace=True)


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """nn.TransformerDecoderLayer, whose `self_attn` and `multihead_attn` are the drop-in. It takes the same arguments.

    >>> import torch
    >>> layer = TransformerDecoderLayer(16, 2, batch_first=True)
    >>> layer(torch.randn(3, 5, 16), torch.randn(3, 7, 16)).shape
    torch.Size([3, 5, 16])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replace(self, inplace=True)


class TransformerEncoder(nn.TransformerEncoder):
    """nn.TransformerEncoder, whose attention is the drop-in. It takes the same arguments.

    In eval without gradients a padded batch is packed before the first layer, as by the original: padding costs
    nothing, and its outputs are 0.

    >>> import torch
    >>> layer = TransformerEncoderLayer(16, 2, batch_first=True)
    >>> TransformerEncoder(layer, num_layers=2)(torch.randn(3, 5, 16)).shape
    torch.Size([3, 5, 16])
    """

    def __init__(self, encoder_layer: nn.TransformerEncoderLayer, *args: Any, **kwargs: Any) -> None:
        super().__init__(encoder_layer, *args, **kwargs)
        replace(self, inplace=True)


class Transformer(nn.Transformer):
    """nn.Transformer, whose attention is the drop-in in encoder and decoder. It takes the same arguments.

    >>> import torch
    >>> model = Transformer(16, 2, 1, 1, 32, batch_first=True)
    >>> model(torch.randn(3, 5, 16), torch.randn(3, 4, 16)).shape
    torch.Size([3, 4, 16])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replace(self, inplace=True)
