"""Maps the names of data types in torch's C++ and in NCCL to torch's Python name and the size of an element."""

from __future__ import annotations

from typing import Final

_TYPES: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "uint8": (1, ("byte", "unsigned char", "uint8_t")),
    "int8": (1, ("char", "signed char", "int8_t")),
    "int16": (2, ("short", "short int")),
    "int32": (4, ("int", "uint32")),
    "int64": (8, ("long", "long int", "uint64", "long long")),
    "float16": (2, ("half", "c10::half", "f16")),
    "bfloat16": (2, ("c10::bfloat16", "bf16")),
    "float32": (4, ("float", "f32")),
    "float64": (8, ("double", "f64")),
    "bool": (1, ()),
    "complex64": (8, ("complexfloat", "c10::complex<float>")),
    "complex128": (16, ("complexdouble", "c10::complex<double>")),
    "float8_e4m3fn": (1, ("f8e4m3", "c10::float8_e4m3fn")),
    "float8_e5m2": (1, ("f8e5m2", "c10::float8_e5m2")),
    "float8_e4m3fnuz": (1, ("c10::float8_e4m3fnuz",)),
    "float8_e5m2fnuz": (1, ("c10::float8_e5m2fnuz",)),
}
_BY_NAME: Final = {
    name: (torch_name, size) for torch_name, (size, others) in _TYPES.items() for name in (torch_name, *others)
}


def known_dtype(name: str | None) -> tuple[str | None, int | None]:
    """Torch's name of a data type and its bytes per element (c10/core/ScalarType.h). An unknown name is returned
    unchanged, with None.
    """
    if not name:
        return None, None
    found = _BY_NAME.get(name.lower())
    return (name, None) if found is None else found
