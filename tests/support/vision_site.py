"""Makes torchvision and timm importable, which lie in a folder of their own (`make .venv/vision`).

transformers would import torchvision wherever it is installed, and its operators are compiled for another build of torch. The
names that its Python registers are declared here; the models ask for none of them but those of detection.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

SITE = Path(__file__).resolve().parents[2] / ".venv" / "vision"
OPERATORS = (
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width) -> (Tensor, Tensor)",
    "ps_roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, int sampling_ratio) -> (Tensor, Tensor)",
    "ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width) -> (Tensor, Tensor)",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, int stride_h, int stride_w, int pad_h, int pad_w, "
    "int dilation_h, int dilation_w, int groups, int offset_groups, bool use_mask) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, int batch_size, int channels, "
    "int height, int width, int sampling_ratio, bool aligned) -> Tensor",
    "_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, int pooled_height, int pooled_width, int batch_size, "
    "int channels, int height, int width) -> Tensor",
    "_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, int batch_size, int channels, int height, int width) -> Tensor",
    "_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, int pooled_height, int pooled_width, "
    "int batch_size, int channels, int height, int width) -> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, int stride_h, int stride_w, "
    "int pad_h, int pad_w, int dilation_h, int dilation_w, int groups, int offset_groups, bool use_mask) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_declared: list[torch.library.Library] = []
"""Kept, since its names go with the object."""


def make_importable() -> None:
    """Let this process import torchvision and timm from now on."""
    if _declared:
        return
    _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
    for schema in OPERATORS:
        _declared[0].define(schema)
    sys.path.append(str(SITE))
