"""From Metal's language to C++ that includes `standin.h`; what is not known here is refused by name."""

from __future__ import annotations

import re

ATTRIBUTES = (
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_position_in_grid",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
)
HEADERS = ("metal_stdlib", "metal_simdgroup_matrix")
KERNEL = re.compile(
    r"(?:\[\[max_total_threads_per_threadgroup\(([\w *]+)\)\]\]\s*)?\bkernel\s+void\s+(\w+)\s*\("
)
MOST_THREADS = 1024
PARAMETER = re.compile(r"(.+?)\s*([*&]?)\s*(\w+)\s*\[\[(\w+)(?:\((\d+)\))?\]\]")


class Unknown(ValueError):
    """Something in a shader that the stand-in does not model."""


def translate(source: str, suffix: str) -> str:
    """C++ for one shader source, in a namespace of its own; its kernels are exported as `NAME_suffix`."""
    text = re.sub(r"//[^\n]*", "", source)
    for header in re.findall(r"#\s*include\s*<([^>]*)>", text):
        if header not in HEADERS:
            raise Unknown(f"the header <{header}> is not modelled")
    if re.search(r"#\s*define.*#\s*include", text, re.DOTALL):
        raise Unknown("a definition before an #include, which reaches into Metal's own headers,")
    text = re.sub(r"#\s*include[^\n]*", "", text)
    text, exports = _kernels(text, suffix)
    text = _threadgroup(text)
    if left := re.search(
        r"\[\[[^\]]*\]\]|\b(kernel|vertex|fragment|texture\w*|sampler|atomic\w*)\b", text
    ):
        raise Unknown(f"{left.group(0)} is not modelled")
    defined = re.findall(r"#\s*define\s+(\w+)", text)
    undone = "".join(f"#undef {name}\n" for name in dict.fromkeys(defined))
    return f"namespace shader_{suffix} {{\n{text}\n{exports}\n}}\n{undone}"


def _threadgroup(text: str) -> str:
    """Arrays in threadgroup memory, and pointers to it, become those that remember who touched them."""
    text = re.sub(r"\bthreadgroup\s+(\w+)\s+(\w+)\s*\[", r"static standin::shared<\1> \2[", text)
    text = re.sub(r"\bthreadgroup\s+(\w+)\s*\*", r"standin::shared<\1>*", text)
    if left := re.search(r"\bthreadgroup\b[^\n]*", text):
        raise Unknown(f"{left.group(0)!r} is not modelled: arrays and plain pointers are")
    return text


def _kernels(text: str, suffix: str) -> tuple[str, str]:
    """The text with kernels as plain functions, and functions of fixed type that call them."""
    exports = []
    while found := KERNEL.search(text):
        end = _closing(text, found.end())
        most, name = found.groups()
        declared, passed = _parameters(text[found.end() : end])
        text = f"{text[: found.start()]}static void {name}({declared}){text[end + 1 :]}"
        exports.append(
            f'extern "C" int {name}_{suffix}(standin::Launch* launch) {{\n'
            f"  return standin::run(launch, [](void** given) {{ {name}({passed}); }});\n}}\n"
            f'extern "C" int {name}_{suffix}_threads() {{ return {most or MOST_THREADS}; }}\n'
        )
    if not exports:
        raise Unknown("no kernel in the source")
    return text, "".join(exports)


def _closing(text: str, start: int) -> int:
    depth = 1
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise Unknown("a kernel's parameters do not end")


def _parameters(text: str) -> tuple[str, str]:
    """What a kernel takes, in C++, and the expressions that its caller passes."""
    declared, passed, places = [], [], []
    for part in (p.strip() for p in text.replace("\n", " ").split(",")):
        found = PARAMETER.fullmatch(part)
        if found is None:
            raise Unknown(f"the parameter {part!r} is not modelled")
        kind, mark, name, attribute, place = found.groups()
        declared.append(f"{kind}{mark} {name}")
        if attribute == "buffer" and mark:
            if kind.split()[0] not in ("device", "constant"):
                raise Unknown(f"the buffer {part!r} is in no address space that is modelled")
            places.append(int(place))
            pointer = f"reinterpret_cast<{kind}*>(given[{place}])"
            passed.append(f"*{pointer}" if mark == "&" else pointer)
        elif attribute in ATTRIBUTES and not mark and kind in ("uint", "uint2", "uint3"):
            passed.append(f"standin::{attribute}<{kind}>()")
        else:
            raise Unknown(f"the parameter {part!r} is not modelled")
    if places != list(range(len(places))):
        raise Unknown(f"buffers are numbered {places}; in order from 0 is what PyTorch binds")
    return ", ".join(declared), ", ".join(passed)
