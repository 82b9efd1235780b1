"""libattnpack_kernels.so: the same bits as the operator without torch, called through its header's structs; programs in
C that find it by CMake and pkg-config; and what it needs of the system."""

import ctypes
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attnpack
import pytest
import torch
from attnpack import reference
from attnpack._load import KERNELS_LIBRARY, LIBRARY, PACKAGE
from processes import ROOT, TORCH_DIR, needs, run_program, run_python

BUILD = Path(os.environ.get("ATTNPACK_BUILD_DIR", ROOT / "build"))
EXAMPLE = ROOT / "examples/c/decode"
HEADER = ROOT / "csrc/attnpack/kernels.h"
WARNINGS = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool]


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "row")]


def fields(struct: str):
    """The members of a struct, as the header declares them."""
    plain = {"size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "double": ctypes.c_double}
    kinds = plain | {"attnpack_dtype": ctypes.c_int, "attnpack_strides": Strides}
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", HEADER.read_text(), re.S)[1]
    for kind, pointer, names in re.findall(r"(?:const )?(\w+)(\*?) ([^;]+);", re.sub(r"//.*", "", body)):
        for name in names.split(", "):
            name, _, count = name.rstrip("]").partition("[")
            yield name, ctypes.c_void_p if pointer else kinds[kind] * int(count) if count else kinds[kind]


class Args(ctypes.Structure):
    _fields_ = list(fields("attnpack_attention_args"))


RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Threads(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int64), ("run", RUN), ("runner", ctypes.c_void_p)]


def load() -> ctypes.CDLL:
    found = ctypes.CDLL(str(KERNELS_LIBRARY))
    for name in ("attnpack_attention", "attnpack_kernels_version", "attnpack_kernels_instruction_set"):
        getattr(found, name).restype = ctypes.c_char_p
    return found


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return load()


def strides(x: torch.Tensor) -> Strides:
    return Strides(*x.stride()[:3])


def arguments(q, k, v, result, lse=None, **others) -> Args:
    """Tensors [B, H, L, D] of any strides, or k and v as pools of pages [pages, H, page_size, D]."""
    args = Args(struct_size=ctypes.sizeof(Args), dtype=DTYPES.index(q.dtype), window_left=-1, window_right=-1)
    args.batch, args.num_heads, args.q_len, args.head_dim = q.shape
    args.num_kv_heads, args.kv_len, args.v_head_dim = k.size(1), k.size(2), v.size(3)
    args.query, args.key, args.value, args.out = (x.data_ptr() for x in (q, k, v, result))
    args.query_strides, args.key_strides, args.value_strides, args.out_strides = map(strides, (q, k, v, result))
    args.lse = lse.data_ptr() if lse is not None else None
    for name, value in others.items():
        setattr(args, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
    return args


def attend(library, args: Args, threads: Threads | None = None) -> None:
    error = library.attnpack_attention(ctypes.byref(args), ctypes.byref(threads) if threads else None)
    assert error is None, error.decode()


def tensors(dtype, q_len=5, kv_len=70, batch=2, num_heads=6, num_kv_heads=2, head_dim=24, v_head_dim=40):
    torch.manual_seed(q_len + kv_len)
    q = torch.randn(batch, q_len, num_heads, head_dim).to(dtype).transpose(1, 2)
    k = torch.randn(batch, num_kv_heads, kv_len + 3, head_dim).to(dtype)[:, :, :kv_len]
    v = torch.randn(batch, num_kv_heads, kv_len, v_head_dim).to(dtype)
    return q, k, v, torch.full((batch, num_heads, q_len, v_head_dim), float("nan"), dtype=dtype)


def doubles(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# arguments of C, and those of the operator
RULES = {
    "plain": ({}, {}),
    "causal": ({"causal": 1, "q_offset": 60}, {"causal": True, "q_offset": 60}),
    "window": ({"window_left": 9, "window_right": 0, "q_offset": 30}, {"window": (9, 0), "q_offset": 30}),
    "chunk": ({"chunk": 9, "causal": 1, "q_offset": 30}, {"chunk": 9, "causal": True, "q_offset": 30}),
    "far": (
        {"window_left": 2**63 - 1, "q_offset": 2**62, "causal": 1},
        {"window": (2**63 - 1, -1), "q_offset": 2**62, "causal": True},
    ),
    "softcap and scale": ({"softcap": 2.5, "scale": 0.7}, {"softcap": 2.5, "scale": 0.7}),
    "sinks": ({"sinks": (s := doubles(0, 1, -2, 3, 0.5, -1))}, {"sinks": s}),
    "alibi": ({"alibi_slopes": (a := doubles(0.1, 0.2, 0.3, 0.4, 0.5, 0.6))}, {"alibi_slopes": a}),
    "head_map": ({"head_map": (m := torch.tensor([1, 0, 0, 1, 1, 1]))}, {"head_map": m.tolist()}),
    "lengths": ({"kv_lens": (n := torch.tensor([70, 13]))}, {"kv_lens": n}),
    "end": ({"kv_lens": n, "causal": 1, "q_offset_end": 1}, {"kv_lens": n, "causal": True, "q_offset": "end"}),
}


@pytest.mark.parametrize("q_len", [1, 5, 130])
@pytest.mark.parametrize("dtype", DTYPES[:4])
@pytest.mark.parametrize("rule", RULES)
def test_the_bits_are_those_of_the_operator(library, rule, dtype, q_len):
    """attention itself is compared with fp64 in tests/ops."""
    of_c, of_python = RULES[rule]
    q, k, v, out = tensors(dtype, q_len)
    lse = torch.empty(q.shape[:3], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    attend(library, arguments(q, k, v, out, lse, **of_c))
    wanted, wanted_lse = attnpack.attention(q, k, v, return_lse=True, **of_python)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    again = torch.empty_like(out)
    attend(library, arguments(q, k, v, again, **of_c))  # without lse
    assert torch.equal(out, again)


@pytest.mark.parametrize(
    "mask", [torch.rand(2, 1, 1, 70) > 0.3, torch.randn(6, 5, 70), torch.randn(2, 6, 5, 70).double()]
)
def test_masks(library, mask):
    q, k, v, out = tensors(torch.float32)
    full = mask.expand(2, 6, 5, 70)
    attend(
        library,
        arguments(
            q,
            k,
            v,
            out,
            mask=mask,
            mask_dtype=DTYPES.index(mask.dtype),
            mask_strides=(ctypes.c_int64 * 4)(*full.stride()),
        ),  # fmt: skip
    )
    assert torch.equal(out, attnpack.attention(q, k, v, mask))


@pytest.mark.parametrize("q_len", [1, 7, 130])
def test_pages(library, q_len):
    """Against the same keys in a row, in plain fp64. Pages that no sequence has hold NaN."""
    q, k, v, out = tensors(torch.float32, q_len, kv_len=150)
    lengths, page_size = torch.tensor([150, 131]), 16
    table = torch.full((2, 12), -1, dtype=torch.int32)
    order = iter(torch.randperm(30).tolist())
    pools = [torch.full((30, page_size, 2, x.size(3)), float("nan")) for x in (k, v)]
    for b, length in enumerate(lengths.tolist()):
        for page, begin in enumerate(range(0, length, page_size)):
            table[b, page] = next(order)
            for pool, x in zip(pools, (k, v), strict=True):
                rows = x[b, :, begin : min(begin + page_size, length)].transpose(0, 1)
                pool[table[b, page], : len(rows)] = rows
    heads = [pool.transpose(1, 2) for pool in pools]
    attend(
        library,
        arguments(
            q,
            *heads,
            out,
            kv_len=150,
            kv_lens=lengths,
            causal=1,
            q_offset_end=1,
            block_table=table,
            table_stride=12,
            page_size=page_size,
            num_pages=30,
        ),  # fmt: skip
    )
    wanted = reference.attention(q.double(), k.double(), v.double(), causal=True, q_offset="end", kv_lens=lengths)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_threads_of_the_caller(library, count):
    """They are handed one piece of work each, and the bits do not change."""
    q, k, v, out = tensors(torch.float32, 130, kv_len=600)
    handed = []

    @RUN
    def run(runner, threads, work, context):
        handed.append(threads)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: WORK(work)(context), range(threads)))

    attend(library, arguments(q, k, v, out), Threads(count, run, None))
    assert torch.equal(out, attnpack.attention(q, k, v))
    assert all(1 < threads <= count for threads in handed) and (not handed) == (count == 1)
    by_helpers = torch.empty_like(out)
    attend(library, arguments(q, k, v, by_helpers), Threads(count, RUN(), None))
    assert torch.equal(by_helpers, out)


@pytest.mark.parametrize("cpus", [1, 2])
def test_without_a_count_the_threads_are_the_cpus_of_the_process(cpus):
    code = f"""
import importlib, os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cpus}])
sys.path[:0] = [{str(ROOT / "tests/project")!r}, {str(ROOT / "tests/support")!r}]
import torch
t = importlib.import_module("test_kernels_library")
q, k, v, out = t.tensors(torch.float32, 130, kv_len=600)
handed = []
run = t.RUN(lambda runner, threads, work, context: (handed.append(threads), t.WORK(work)(context)) and None)
t.attend(t.load(), t.arguments(q, k, v, out), t.Threads(0, run, None))
print(*handed)
"""
    ran = run_python(code)
    available = min(cpus, len(os.sched_getaffinity(0)))
    assert ran.stdout.split() == ([] if available == 1 else [str(available)]), ran.text


def test_eight_threads_call_at_once(library):
    q, k, v, out = tensors(torch.float32, 60, kv_len=600)
    results = [torch.empty_like(out) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda result: [attend(library, arguments(q, k, v, result)) for _ in range(20)], results))
    wanted = attnpack.attention(q, k, v)
    assert all(torch.equal(result, wanted) for result in results)


WRONG = {
    "struct_size is 8": {"struct_size": 8},
    "dtype is 4": {"dtype": 4},
    "mask_dtype is 9": {"mask_dtype": 9, "mask": torch.zeros(1)},
    "batch is -1": {"batch": -1},
    "query is NULL": {"query": None},
    "out is NULL": {"out": None},
    "which 4 kv heads do not divide": {"num_kv_heads": 4},
    "num_kv_heads is 0": {"num_kv_heads": 0},
    "head_map[0] is 2, wants 0 to 1": {"head_map": torch.tensor([2, 0, 0, 0, 0, 0])},
    "the window is -2, -1": {"window_left": -2},
    "chunk is -1, wants how many": {"chunk": -1},
    "softcap is -1": {"softcap": -1.0},
    "scale is nan": {"scale": float("nan")},
    "q_offset is 3 with q_offset_end": {"q_offset": 3, "q_offset_end": 1},
    "kv_lens[1] is 71, wants 0 to kv_len = 70": {"kv_lens": torch.tensor([0, 71])},
    "query [2, 6, 2305843009213693951, 24] takes more memory than a process can have": {"q_len": 2**61 - 1},
    "key [2, 2, 9223372036854775807, 24] takes": {"kv_len": 2**63 - 1},
    "out [2, 6, 5, 1152921504606846976] takes": {"v_head_dim": 2**60},
    "value [2, 2, 1073741824, 1073741824] takes": {"kv_len": 2**30, "v_head_dim": 2**30},
    "mask [2, 6, 5, 2251799813685248] takes": {
        "kv_len": 2**51, "mask": torch.zeros(1), "mask_dtype": 1, "head_dim": 0, "v_head_dim": 0, "num_kv_heads": 1,
    },
    "block_table [2, 9223372036854775807] takes": {
        "block_table": torch.zeros(1, dtype=torch.int32), "table_stride": 2**63 - 1, "num_pages": 1, "page_size": 70,
    },
    "page_size is 0": {"block_table": torch.zeros(2, 9, dtype=torch.int32), "num_pages": 2},
    "table_stride is 9, sequence 0 has 70 keys, wants 10 pages": {
        "block_table": torch.zeros(2, 9, dtype=torch.int32), "table_stride": 9, "page_size": 7, "num_pages": 2,
    },
    "block_table names page -1 for sequence 0, wants 0 to 1": {
        "block_table": torch.full((2, 1), -1, dtype=torch.int32), "table_stride": 1, "page_size": 70, "num_pages": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_arguments_are_named_before_anything_is_written(library, sentence):
    q, k, v, out = tensors(torch.float32)
    error = library.attnpack_attention(ctypes.byref(arguments(q, k, v, out, **WRONG[sentence])), None)
    assert error and f"attnpack: {sentence}" in error.decode().replace("args.", "").replace("num_heads is 6, ", "")
    assert out.isnan().all()


def test_sizes_that_no_process_has_are_refused():
    """In a process of its own: these sizes ended it. The tensors are small, so nothing may be read."""
    code = f"""
import importlib, itertools, sys
sys.path[:0] = [{str(ROOT / "tests/project")!r}, {str(ROOT / "tests/support")!r}]
import ctypes, torch
t = importlib.import_module("test_kernels_library")
library, given = t.load(), t.tensors(torch.float32)
sizes = ("batch", "num_heads", "num_kv_heads", "q_len", "kv_len", "head_dim", "v_head_dim")
table, numbers, tried = torch.zeros(2, 9, dtype=torch.int32), torch.zeros(6, dtype=torch.int64), set()
for name, other in itertools.product(sizes, sizes + ("page_size", "num_pages")):
    for huge in (2**57, 2**60, 2**61 - 1, 2**63 - 1):
        args = t.arguments(*given, **{{other: 0, name: huge}}, table_stride=9)
        args.block_table = table.data_ptr() if other.startswith("page") else None
        args.head_map, args.kv_lens = numbers.data_ptr(), numbers.data_ptr()
        error = library.attnpack_attention(ctypes.byref(args), None)
        assert error, (name, other, huge)
        tried.add(error.decode().split()[1])
print(*sorted(tried))
"""
    ran = run_python(code)
    assert ran.returncode == 0 and {"query", "key", "out"} <= set(ran.stdout.split()), ran.text


def test_nothing_to_do(library):
    """Empty dimensions are legal, and rows without keys give 0."""
    q, k, v, out = tensors(torch.float32)
    attend(library, arguments(q, k, v, out, batch=0))
    attend(library, arguments(q, k, v, out, q_len=0))
    assert out.isnan().all()
    attend(library, arguments(q, k, v, out, kv_len=0))
    assert (out == 0).all()


def test_no_arguments_and_no_threads(library):
    assert b"args is NULL" in library.attnpack_attention(None, None)
    q, k, v, out = tensors(torch.float32)
    few = Threads(-1, RUN(), None)
    assert b"threads.count is below 0" in library.attnpack_attention(
        ctypes.byref(arguments(q, k, v, out)), ctypes.byref(few)
    )


def test_version_and_instruction_set(library):
    assert library.attnpack_kernels_version().decode() == attnpack.__version__
    assert library.attnpack_kernels_instruction_set().decode() == attnpack._C.isa()
    code = (
        f"import ctypes; k = ctypes.CDLL({str(KERNELS_LIBRARY)!r}); f = k.attnpack_kernels_instruction_set; "
        "f.restype = ctypes.c_char_p; print(f())"
    )
    for name, wanted in (("baseline", "b'baseline'"), ("avx3", "None")):
        ran = run_program(sys.executable, "-c", code, env={"ATTNPACK_ISA": name})
        assert ran.stdout.strip() == wanted, ran.text


def test_it_needs_nothing_of_torch_and_gives_few_names():
    """Both libraries share it: libattnpack.so has no kernels of its own."""
    needed = run_program("readelf", "-d", KERNELS_LIBRARY).stdout
    assert set(re.findall(r"Shared library: \[(\w+)", needed)) <= {"libstdc", "libm", "libgcc_s", "libc", "ld"}
    names = run_program("nm", "-D", "--defined-only", "--demangle", KERNELS_LIBRARY).stdout
    own = {line.split(maxsplit=2)[2] for line in names.splitlines() if "attnpack" in line}
    declared = set(re.findall(r"^const char\* (\w+)\(", HEADER.read_text(), re.M))
    assert declared == {"attnpack_attention", "attnpack_kernels_version", "attnpack_kernels_instruction_set"}
    threads = "attnpack::run_with_helpers(long, void (*)(void*), void*)"
    assert own - {threads, "attnpack_kernel_table"} == declared
    of_the_other = run_program("nm", "--defined-only", "--demangle", LIBRARY).stdout
    assert not re.search(r"attnpack::(baseline|avx2|avx512)::", of_the_other)
    assert f"Shared library: [{KERNELS_LIBRARY.name}]" in run_program("readelf", "-d", LIBRARY).stdout


def test_no_command_of_its_build_depends_on_torch():
    """So scripts/wheel.sh compiles the kernels once for several releases of torch."""
    commands = run_program("ninja", "-C", BUILD, "-t", "commands", "libattnpack_kernels.so").stdout
    assert "-DATTNPACK_ISA=baseline" in commands
    assert "TORCH_VERSION" not in commands and str(TORCH_DIR) not in commands


def test_a_kernels_library_of_another_build_is_refused(tmp_path):
    """Its table has other functions at the same places."""
    source = tmp_path / "other.cpp"
    source.write_text(
        """#include <cstddef>
        #include <cstdint>
        struct { const char* version; size_t size; const void* isas; size_t count; } table{"0.0.9", 8, nullptr, 0};
        extern "C" const void* attnpack_kernel_table() { return &table; }
        namespace attnpack { void run_with_helpers(int64_t, void (*task)(void*), void* context) { task(context); } }"""
    )
    copied = tmp_path / "lib"
    copied.mkdir()
    library = copied / KERNELS_LIBRARY.name
    built = run_program("c++", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", source, "-o", library)
    assert built.returncode == 0, built.text
    ran = run_python(f"import ctypes; ctypes.CDLL({str(library)!r}); import attnpack; attnpack._C.isa()")
    assert "libattnpack_kernels is of version 0.0.9 or of another build, libattnpack of" in ran.text


def check_the_example(program: Path) -> None:
    ran = run_program(program, env={})
    assert ran.returncode == 0, ran.text
    first, prompt, decode, wrong = ran.stdout.splitlines()
    assert first == f"attnpack {attnpack.__version__}, {attnpack._C.isa()}"
    assert float(prompt.split()[-1]) < 1e-6 and float(decode.split()[-1]) < 1e-6
    assert wrong == "wrong   attnpack: kv_lens[0] is 41, wants 0 to kv_len = 40"


def test_a_program_in_c_finds_it_by_cmake(tmp_path):
    flags = f"-DCMAKE_C_FLAGS={' '.join(WARNINGS[1:])}"
    for command in (
        ("cmake", "-S", EXAMPLE, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={PACKAGE}", flags),
        ("cmake", "--build", tmp_path),
    ):
        process = run_program(*command)
        assert process.returncode == 0, process.text
    check_the_example(tmp_path / "decode")


@needs("pkg-config")
@pytest.mark.parametrize("compiler", ["gcc", pytest.param("clang", marks=[needs("clang"), pytest.mark.long])])
def test_a_program_in_c_finds_it_by_pkg_config(tmp_path, compiler):
    flags = run_program(
        "pkg-config", "--cflags", "--libs", "attnpack_kernels", env={"PKG_CONFIG_PATH": f"{PACKAGE}/lib/pkgconfig"}
    )
    assert flags.returncode == 0, flags.text
    program = tmp_path / "decode"
    built = run_program(compiler, *WARNINGS, EXAMPLE / "main.c", "-o", program, *flags.stdout.split(), "-lm")
    assert built.returncode == 0, built.text
    check_the_example(program)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_it_is_built_without_torch_and_python(tmp_path):
    build, prefix = tmp_path / "b", tmp_path / "prefix"
    for command in (
        ("cmake", "-S", ROOT, "-B", build, "-DATTNPACK_KERNELS_ONLY=ON", "-DATTNPACK_ISA_NAMES=avx2"),
        ("cmake", "--build", build, "--parallel", "2"),
        ("cmake", "--install", build, "--prefix", prefix),
        ("cmake", "-S", EXAMPLE, "-B", tmp_path / "c", f"-DCMAKE_PREFIX_PATH={prefix}"),
        ("cmake", "--build", tmp_path / "c"),
        (tmp_path / "c/decode",),
    ):
        process = run_program(*command, timeout=1100, env={"PATH": "/usr/local/bin:/usr/bin:/bin"})
        assert process.returncode == 0, process.text
    assert not (prefix / "include/attnpack/attnpack.h").exists()
