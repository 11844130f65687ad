"""Models of torchvision and timm, as `path.py:name` reads them: small images, a loss, and no random draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import vision_site

CLASSIFIERS = (
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vgg11",
    "vgg11_bn",
    "vit_b_16",
    "wide_resnet50_2",
)
SEGMENTS = ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
VIDEOS = ("mc3_18", "mvit_v1_b", "r2plus1d_18", "r3d_18", "s3d", "swin3d_t")
DETECTORS = ("fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn", "ssdlite320_mobilenet_v3_large")
TIMM = (
    "beit_base_patch16_224",
    "botnet26t_256",
    "cait_xxs24_224",
    "coat_lite_tiny",
    "coatnet_nano_rw_224",
    "convmixer_768_32",
    "convnextv2_atto",
    "crossvit_9_240",
    "cspresnet50",
    "deit_tiny_patch16_224",
    "dla34",
    "dpn48b",
    "edgenext_xx_small",
    "efficientformer_l1",
    "efficientvit_b0",
    "eva02_tiny_patch14_224",
    "fastvit_t8",
    "focalnet_tiny_srf",
    "gernet_s",
    "ghostnet_050",
    "gmlp_s16_224",
    "hardcorenas_a",
    "hrnet_w18_small",
    "inception_next_tiny",
    "lcnet_050",
    "levit_128s",
    "maxxvit_rmlp_nano_rw_256",
    "mixer_s32_224",
    "mobilevit_xxs",
    "mobilevitv2_050",
    "nest_tiny",
    "nf_resnet26",
    "nfnet_l0",
    "pit_ti_224",
    "poolformer_s12",
    "pvt_v2_b0",
    "repvgg_a0",
    "res2net50_26w_4s",
    "resmlp_12_224",
    "resnest14d",
    "rexnet_100",
    "sequencer2d_s",
    "skresnet18",
    "swin_s3_tiny_224",
    "swinv2_cr_tiny_ns_224",
    "tiny_vit_5m_224",
    "tnt_s_patch16_224",
    "twins_pcpvt_small",
    "vit_tiny_patch16_224",
    "volo_d1_224",
    "xcit_nano_12_p16_224",
)
WIDE = {"inception_v3": 299, "maxvit_t": 224, "vit_b_16": 224}
"""Sizes of images that a model insists on."""
BATCH, NUM_CLASSES = 4, 8
Made = tuple[nn.Module, tuple[Any, ...]]


class Judged(nn.Module):
    """The cross-entropy of what a model returns first: classes of images, or of each place."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.body(x)
        if isinstance(out, dict):
            out = out["out"]
        return F.cross_entropy(out[0] if isinstance(out, (tuple, list)) else out, y)


def _still(model: nn.Module) -> nn.Module:
    """Return the model without random draws."""
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) or type(part).__name__ == "StochasticDepth":
            part.p = 0.0  # type: ignore[assignment]
        if hasattr(part, "drop_rate"):
            part.drop_rate = 0.0  # type: ignore[assignment]
    return model


def _classifier(name: str) -> Made:
    vision_site.make_importable()
    import torchvision

    model = torchvision.models.get_model(
        name, weights=None, num_classes=NUM_CLASSES, **({"init_weights": False} if name == "googlenet" else {})
    )
    size = WIDE.get(name, 64)
    return Judged(_still(model)), (torch.randn(BATCH, 3, size, size), torch.randint(0, NUM_CLASSES, (BATCH,)))


def _segments(name: str) -> Made:
    vision_site.make_importable()
    import torchvision

    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=NUM_CLASSES)
    return Judged(_still(model)), (torch.randn(BATCH, 3, 64, 64), torch.randint(0, NUM_CLASSES, (BATCH, 64, 64)))


def _video(name: str) -> Made:
    vision_site.make_importable()
    import torchvision

    model = torchvision.models.get_model(name, weights=None, num_classes=NUM_CLASSES)
    frames, size = (16, 224) if name.startswith(("mvit", "s3d")) else (8, 64)
    return Judged(_still(model)), (torch.randn(2, 3, frames, size, size), torch.randint(0, NUM_CLASSES, (2,)))


def _detector(name: str) -> Made:
    vision_site.make_importable()
    import torchvision

    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=NUM_CLASSES)
    return _still(model), (
        [torch.rand(3, 64, 64)],
        [{"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.ones(1, dtype=torch.int64)}],
    )


def _timm(name: str) -> Made:
    vision_site.make_importable()
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=NUM_CLASSES)
    size = model.default_cfg["input_size"]
    return Judged(_still(model)), (torch.randn(BATCH, *size), torch.randint(0, NUM_CLASSES, (BATCH,)))


FAMILIES: dict[str, tuple[tuple[str, ...], Callable[[str], Made]]] = {
    "torchvision: classifiers": (CLASSIFIERS, _classifier),
    "torchvision: segmentation": (SEGMENTS, _segments),
    "torchvision: video": (VIDEOS, _video),
    "torchvision: detection": (DETECTORS, _detector),
    "timm": (TIMM, _timm),
}


def names() -> list[str]:
    """Return the functions of this file that build a model, by name."""
    return [_called(title, name) for title, (held, _) in FAMILIES.items() for name in held]


def _called(title: str, name: str) -> str:
    return ("timm_" if title == "timm" else "") + name


for _title, (_names, _make) in FAMILIES.items():
    for _name in _names:
        globals()[_called(_title, _name)] = partial(_make, _name)
