"""SVG timetables as PNG images, with the small renderer of the extra `pictures`."""

from __future__ import annotations

from stagewright.errors import InputError


def png_image(svg: str, *, zoom: float = 2.0) -> bytes:
    """The PNG of an SVG document, `zoom` pixels per unit.

    Raises:
        InputError: the renderer is not installed.
    """
    try:
        import resvg_py
    except ImportError:
        raise InputError(
            "PNG images are rendered by a package that is not installed: pip install 'stagewright[pictures]' "
            "(resvg_py, 3 MB), or write --svg and convert that file"
        ) from None
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=zoom))
