"""PyTorch's transformer layers with the drop-in as their attention: same arguments and state_dict."""

from __future__ import annotations

from typing import Any

from torch import nn

from multihead.compat.torch_nn.replace import replace


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """nn.TransformerEncoderLayer with the drop-in as `self_attn` and the same arguments.

    >>> import torch
    >>> TransformerEncoderLayer(16, 2, batch_first=True)(torch.randn(3, 5, 16)).shape
    torch.Size([3, 5, 16])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replace(self, inplace=True)


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """nn.TransformerDecoderLayer with the drop-in as `self_attn` and `multihead_attn`, and the same arguments.

    >>> import torch
    >>> layer = TransformerDecoderLayer(16, 2, batch_first=True)
    >>> layer(torch.randn(3, 5, 16), torch.randn(3, 7, 16)).shape
    torch.Size([3, 5, 16])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replace(self, inplace=True)


class TransformerEncoder(nn.TransformerEncoder):
    """nn.TransformerEncoder with the drop-in as its attention, and the same arguments.

    In eval without gradients a padded batch is packed before the first layer, as by the original: padding is not
    computed, and its outputs are 0.

    >>> import torch
    >>> layer = TransformerEncoderLayer(16, 2, batch_first=True)
    >>> TransformerEncoder(layer, num_layers=2)(torch.randn(3, 5, 16)).shape
    torch.Size([3, 5, 16])
    """

    def __init__(self, encoder_layer: nn.TransformerEncoderLayer, *args: Any, **kwargs: Any) -> None:
        super().__init__(encoder_layer, *args, **kwargs)
        replace(self, inplace=True)


class Transformer(nn.Transformer):
    """nn.Transformer with the drop-in as the attention of encoder and decoder, and the same arguments.

    >>> import torch
    >>> model = Transformer(16, 2, 1, 1, 32, batch_first=True)
    >>> model(torch.randn(3, 5, 16), torch.randn(3, 4, 16)).shape
    torch.Size([3, 4, 16])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replace(self, inplace=True)
