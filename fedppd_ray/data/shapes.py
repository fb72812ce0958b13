"""Images of one shape as images of another: for sets that are held against data of another size or colour."""

import numpy as np
import torch
from torch.nn.functional import interpolate

from fedppd_ray.config.nouns import DatasetInfo
from fedppd_ray.data.parts import BYTES, Images, Values

_CHUNK = 2000  # images at a time, as floats


def image_shape(info: DatasetInfo) -> tuple[int, int, int]:
    """(channels, height, width) of a data set that is made of images."""
    channels, height, width = info.shape
    return channels, height, width


def in_range(images: Images, span: tuple[float, float]) -> Values:
    """Values of 0–255 as values of another range (16 bits, floats), black to its least and white to its largest."""
    if span == BYTES:
        return images
    low, high = span
    return (low + images.astype(np.float32) * ((high - low) / BYTES[1])).astype(np.float32)


def as_bytes(images: Values, span: tuple[float, float]) -> Images:
    """The way back, rounded; for what is made of images and need not be exact."""
    if span == BYTES:
        return images
    low, high = span
    unit = (np.asarray(images, np.float32) - low) / (high - low)
    result: Images = np.rint(BYTES[1] * np.clip(unit, 0, 1)).astype(np.uint8)
    return result


def fitted(images: Images, shape: tuple[int, int, int]) -> Images:
    """Bilinear, grey to colour by repetition, colour to grey by the mean; images of this shape as they are."""
    if images.shape[1:] == shape:
        return images
    channels = shape[0]
    parts = []
    for start in range(0, len(images), _CHUNK):
        part = resized(np.asarray(images[start : start + _CHUNK]), shape[1:])
        if part.shape[1] != channels:
            grey = np.rint(part.mean(axis=1, keepdims=True)).astype(np.uint8)
            part = np.repeat(grey, channels, axis=1)
        parts.append(part)
    return np.concatenate(parts) if parts else np.empty((0, *shape), np.uint8)


def resized(images: Images, size: tuple[int, int]) -> Images:
    """Bilinear, smoothed where it shrinks."""
    if images.shape[2:] == size:
        return images
    pixels = torch.from_numpy(np.array(images, np.float32))
    scaled = interpolate(pixels, size=list(size), mode="bilinear", align_corners=False, antialias=True)
    result: Images = np.rint(np.clip(scaled.numpy(), 0, 255)).astype(np.uint8)
    return result
