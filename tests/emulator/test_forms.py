"""Forms of memory, warps and floating point that neither another test nor a recorded probe executes: semantics, scopes, hints, types.

test_isa_coverage.py says which alternative of which row lacks a test. Oracles are numpy, or forms that an H200 has confirmed.
"""

import itertools

import numpy as np
import pytest
from emulator.harness import kernel, lanes, launch

from flash_attn_mx import emulator

U = np.uint32
F = np.float32
LANE = np.arange(32, dtype=np.uint32)
RND = ("rn", "rz", "rm", "rp")


def dots(*parts):
    return ".".join(p for p in parts if p)


def floats(seed, n=32, special=True):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * 2.0 ** rng.integers(-20, 20, n)).astype(F)
    if special:
        x[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-130, -(2.0**-149), 3.4e38]
    return np.roll(x, seed)


def one(line, ins, out=np.uint32, decls=""):
    return lanes(line, ins, [out], decls)[0]


# ---- moves and comparison --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("t", ["b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"])  # fmt: skip
def test_mov(t):
    u = np.dtype(f"uint{t[1:]}").type
    x = np.random.default_rng(1).integers(0, 1 << 16, 32).astype(u) * u(257)
    assert (one(f"mov.{t} %o0, %a0;", [x], u) == x).all()


def test_mov_pred_copies_lane_by_lane():
    body = "setp.lt.u32 %q, %a0, 9; mov.pred %r, %q; setp.ge.u32 %q, %a0, 0; selp.u32 %o0, 1, 0, %r;"  # fmt: skip
    assert (one(body, [LANE], decls=".reg .pred %q, %r;") == (LANE < 9)).all()


def test_mov_b128_and_128_bit_accesses():
    x = np.arange(4, dtype=np.uint64)
    y = np.zeros(8, np.uint64)
    x, y = aligned(x), aligned(y)
    body = """ld.global.b128 %v, [%p0]; mov.b128 %w, %v; mov.b128 {%d0, %d1}, %w; st.global.b128 [%p1], %v; st.global.v2.b64 [%p1+16], {%d1, %d0};
    st.shared.b128 [buf], %w; ld.shared.v2.b64 {%d0, %d1}, [buf]; st.global.v2.b64 [%p1+32], {%d0, %d1};"""
    launch(kernel(body, 2, ".reg .b128 %v, %w; .reg .b64 %d<2>; .shared .align 16 .b8 buf[16];"), [x, y], block=1)  # fmt: skip
    assert y.tolist() == [0, 1, 1, 0, 0, 1, 0, 0]


def aligned(x, n=256):
    y = np.zeros(x.nbytes + n, np.uint8)
    y = y[-y.ctypes.data % n :][: x.nbytes].view(x.dtype)
    y[:] = x.reshape(-1)
    return y


@pytest.mark.parametrize("c,f", [("eq", np.equal), ("ne", np.not_equal)])
def test_set_b32(c, f):
    a, b = LANE % 3, LANE % 5
    for t in ("u32", "s32"):
        assert (one(f"set.{c}.{t}.b32 %o0, %a0, %a1;", [a, b]) == np.where(f(a, b), 0xFFFFFFFF, 0)).all()  # fmt: skip


# ---- floating point --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op,k", [("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)])
@pytest.mark.parametrize("r,ftz", list(itertools.product(("", *RND), ("", "ftz"))))
def test_f32x2_is_two_f32(op, k, r, ftz):
    """Each half of the packed form, against the scalar form that an H200 has confirmed."""
    if op == "fma" and not r:
        return
    lo, hi = [floats(i) for i in range(k)], [floats(i + 5) for i in range(k)]
    pairs = [np.stack(p, -1).reshape(-1).view(np.uint64) for p in zip(lo, hi)]
    args = ", ".join(f"%a{i}" for i in range(k))
    got = one(f"{dots(op, r, ftz, 'f32x2')} %o0, {args};", pairs, np.uint64).view(U).reshape(32, 2)
    for j, x in enumerate((lo, hi)):
        assert (got[:, j] == one(f"{dots(op, r, ftz, 'f32')} %o0, {args};", x)).all()


@pytest.mark.parametrize("op", ["add", "sub", "fma"])
@pytest.mark.parametrize("t", ["f16", "bf16"])
@pytest.mark.parametrize("r,sat", list(itertools.product(("", *RND), ("", "sat"))))
def test_mixed_precision_is_exact_widening_and_the_f32_form(op, t, r, sat):
    if op == "fma" and not r:
        return
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 65536, 32).astype(np.uint16) for _ in range(2))
    c = floats(2)
    narrow = [a, b, c] if op == "fma" else [a, c]
    wide = [one(f"cvt.f32.{t} %o0, %a0;", [x]) if x.itemsize == 2 else x for x in narrow]
    args = ", ".join(f"%a{i}" for i in range(len(narrow)))
    got = one(f"{dots(op, r, sat, 'f32', t)} %o0, {args};", narrow)
    assert (got == one(f"{dots(op, r or 'rn', sat, 'f32')} %o0, {args};", wide)).all()


def test_mad_without_rounding_is_fma():
    x = [floats(i) for i in range(3)]
    for t, u in (("f32", F), ("f64", np.float64)):
        y = [v.astype(u) for v in x]
        want = one(f"fma.rn.{t} %o0, %a0, %a1, %a2;", y, u)
        assert (one(f"mad.{t} %o0, %a0, %a1, %a2;", y, u).view(np.uint8) == want.view(np.uint8)).all()  # fmt: skip


@pytest.mark.parametrize("op,f", [("min", np.fmin), ("max", np.fmax)])
@pytest.mark.parametrize("ftz,nan", list(itertools.product(("", "ftz"), ("", "NaN"))))
def test_minmax_abs_of_three(op, f, ftz, nan):
    x = [floats(i) for i in range(3)]
    m = [np.abs(v) for v in x]
    if ftz:
        m = [np.where(v < 2.0**-126, F(0), v) for v in m]
    want = f(f(m[0], m[1]), m[2])
    got = one(f"{dots(op, ftz, nan, 'abs', 'f32')} %o0, %a0, %a1, %a2;", x).view(F)
    if nan:
        want = np.where(np.isnan(m).any(0), F(np.nan), want)
    assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize("r", ["rn", "rz"])
@pytest.mark.parametrize("relu", ["", "relu"])
def test_satfinite_clamps_what_the_plain_form_makes_infinite(r, relu):
    """Values beyond the largest finite one, infinities included, give that one; NaN stays NaN; the rest as without."""
    x = np.array([1.5, -2.25, 0.0, -0.0, np.inf, -np.inf, np.nan, 3.4028235e38, -3.4028235e38, 65504, 65519, 65520, 1e5, -7e4, 2.0**-20, -(2.0**-140)] * 2, F)  # fmt: skip
    for t, top in (("f16", 0x7BFF), ("bf16", 0x7F7F), ("tf32", 0x7F7FE000)):
        wide = t == "tf32"
        inf = 0x7F800000 if wide else 0x7C00 if t == "f16" else 0x7F80
        sign, out = (0x80000000, np.uint32) if wide else (0x8000, np.uint16)
        plain = one(f"{dots('cvt', r, relu, t, 'f32')} %o0, %a0;", [x], out).astype(np.uint32)
        order = (r, "satfinite", relu) if wide else (r, relu, "satfinite")
        got = one(f"{dots('cvt', *order, t, 'f32')} %o0, %a0;", [x], out)
        beyond = ~np.isnan(x) & ((plain & (sign - 1)) >= top)
        want = np.where(beyond, plain & sign | top, plain)
        if relu:
            want = np.where(x == -np.inf, 0, want)
        assert inf not in (want & (sign - 1)) and (got == want).all(), t
        if not wide:
            pair = one(
                f"{dots('cvt', *order, t + 'x2', 'f32')} %o0, %a0, %a1;", [x, x[::-1].copy()]
            )
            assert (pair == got.astype(U) << 16 | got[::-1]).all()


def test_f16_from_f16_forms_take_no_saturation_to_finite():
    with pytest.raises(emulator.PtxError, match="unknown instruction form"):
        one("cvt.satfinite.f64.f32 %o0, %a0;", [F(1)], np.uint64)


@pytest.mark.parametrize("r", ["rz", "rp"])
@pytest.mark.parametrize("sat", ["", "satfinite"])
def test_ue8m0_of_bf16_pairs(r, sat):
    x = np.array([0x3F80, 0x3FC0, 0x0000, 0x0001, 0x7F7F, 0x7FC0, 0x0080, 0x4040, 0x3F81, 0x0040, 0x7F00, 0x3F00] * 3, np.uint16)[:32]  # fmt: skip
    pair = x.astype(U) | x[::-1].astype(U) << 16
    got = one(f"{dots('cvt', r, sat, 'ue8m0x2', 'bf16x2')} %o0, %a0;", [pair], np.uint16)
    wide = [(v.astype(U) << 16).view(F) for v in (x[::-1].copy(), x)]
    want = one(f"{dots('cvt', r, sat, 'ue8m0x2', 'f32')} %o0, %a0, %a1;", wide, np.uint16)
    assert (got == want).all()


# ---- loads and stores ------------------------------------------------------------------------------------------------
SCOPES = ("cta", "cluster", "gpu", "sys")
SEMANTICS = ["", "weak", "volatile"]
LOADS = [
    *(dots(s, "global") for s in SEMANTICS), *(dots(s, c, "global") for s in ("relaxed", "acquire") for c in SCOPES),
    *(f"global.{c}" for c in ("ca", "cg", "cs", "lu", "cv", "nc", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B")),
    "global.nc.L1::no_allocate.L2::256B", *(f"global.L1::evict_last.L2::{c}.v8" for c in ("evict_normal", "evict_first", "evict_last")),
    "", "relaxed.gpu", *(f"{s}.{c}.shared{w}" for s, c in (("relaxed", "cta"), ("acquire", "cluster")) for w in ("", "::cta", "::cluster")), "shared::cta", "volatile.shared",
    *(f"global.{s}.{c}" for s in ("relaxed", "acquire") for c in SCOPES), "global.volatile", "global.relaxed.sys.L1::no_allocate",
    *(f"shared{w}.{s}" for w in ("", "::cta", "::cluster") for s in ("volatile", "relaxed.cta", "acquire.cluster")), "const", "local", "global.L2::cache_hint",
]  # fmt: skip
TYPES = ["b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64"]  # fmt: skip


def where(how):
    """Address of 128 bytes in the space that an instruction's modifiers name, and the lines that put %p0's bytes there."""
    copy = "\n".join(f"ld.global.b32 %r0, [%p0+{4 * i}]; st.TO.b32 [%at+{4 * i}], %r0;" for i in range(32))  # fmt: skip
    if "shared" in how:
        return "%s", f"mov.u32 %s, buf;\n{copy.replace('TO', 'shared').replace('%at', '%s')}\n"
    if "local" in how:
        return "%d3", f"mov.u64 %d3, here;\n{copy.replace('TO', 'local').replace('%at', '%d3')}\n"
    if "const" in how:
        return "fixed", ""
    return "%p0", ""


@pytest.mark.parametrize("how", LOADS)
def test_ld(how):
    """Every ordering, scope and hint: the value is that of the plain load."""
    x = aligned(np.arange(32, dtype=np.uint32) * 0x01010101 + 1)
    y = aligned(np.zeros(16, np.uint32))
    at, fill = where(how)
    words = ", ".join(str(v) for v in x)
    hint, policy = ("", "") if "cache_hint" not in how else (", %pol", "createpolicy.fractional.L2::evict_last.b64 %pol, 1.0;")  # fmt: skip
    if ".v8" in how:
        body = f"ld.{how}.b32 {{{', '.join(f'%r{i}' for i in range(8))}}}, [{at}+32];\n" + "\n".join(f"st.global.b32 [%p1+{4 * i}], %r{i};" for i in range(8))  # fmt: skip
        want = x[8:16]
    else:
        body = f"ld.{dots(how, 'v2.b32')} {{%r1, %r2}}, [{at}+8]{hint};\nst.global.v2.b32 [%p1], {{%r1, %r2}};"
        want = x[2:4]
    decls = ".reg .b32 %s, %r<9>; .reg .b64 %pol, %d<4>; .local .align 16 .b8 here[128];\n.shared .align 16 .b8 buf[128];"
    launch(kernel(f"{policy}{fill}{body}", 2, decls, module=f".const .align 16 .b32 fixed[32] = {{{words}}};"), [x, y], block=1)  # fmt: skip
    assert (y[: len(want)] == want).all()


@pytest.mark.parametrize("t", TYPES)
@pytest.mark.parametrize("how,v", [("global.relaxed.gpu", ""), ("global.acquire.sys", "v2"), ("shared.volatile", ""), ("shared.volatile", "v4"), ("volatile.shared", "v2")])  # fmt: skip
def test_ld_types_of_the_other_order_of_modifiers(how, v, t):
    """CuTe DSL writes the space before the ordering."""
    n, b = int(v[1:] or 1), int(t[1:]) // 8
    if n * b > 16:
        return
    x = aligned(np.random.default_rng(2).integers(0, 256, 128).astype(np.uint8))
    y = aligned(np.zeros(32, np.uint8))
    at, fill = where(how)
    reg = max(b, 2)
    regs = [f"%x{i}" for i in range(n)]
    body = f"{fill}ld.{dots(how, v, t)} {regs[0] if n == 1 else '{' + ', '.join(regs) + '}'}, [{at}+16];\n"
    body += "\n".join(f"st.global.b{8 * reg} [%p1+{i * reg}], {r};" for i, r in enumerate(regs))
    decls = f".reg .b32 %s, %r<9>; .reg .b64 %d<4>; .reg .b{8 * reg} {', '.join(regs)};\n.shared .align 16 .b8 buf[128];"  # fmt: skip
    launch(kernel(body, 2, decls), [x, y], block=1)
    values = x[16 : 16 + n * b].view({"s": f"i{b}"}.get(t[0], f"u{b}")).astype({"s": f"i{reg}"}.get(t[0], f"u{reg}"))  # fmt: skip
    assert (y[: n * reg] == values.view(np.uint8)).all()


STORES = [
    "", "global", "weak.global", "volatile.global", *(f"{s}.{c}.global" for s in ("relaxed", "release") for c in SCOPES), *(f"global.{c}" for c in ("wb", "cg", "cs", "wt")),
    *(f"global.L1::{c}" for c in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")), *(f"global.L1::evict_last.L2::{c}.v8" for c in ("evict_normal", "evict_first", "evict_last")),
    "shared", "shared::cta", "shared::cluster", "local", "global.L2::cache_hint",
]  # fmt: skip


@pytest.mark.parametrize("how", STORES)
def test_st(how):
    y = aligned(np.zeros(32, np.uint32))
    at = "%p0" if not any(s in how for s in ("shared", "local")) else "%s" if "shared" in how else "%d3"  # fmt: skip
    back = "" if at == "%p0" else "\n".join(f"ld.{how}.b32 %r0, [{at}+{4 * i}]; st.global.b32 [%p0+{4 * i}], %r0;" for i in (8, 9))  # fmt: skip
    n = 8 if ".v8" in how else 2
    vec = "{" + ", ".join(f"%r{i + 1}" for i in range(n)) + "}"
    values = "\n".join(f"mov.u32 %r{i + 1}, {100 + i};" for i in range(8))
    v = "" if ".v8" in how else "v2"
    hint = ", %pol" if "cache_hint" in how else ""
    body = f"mov.u32 %s, buf; mov.u64 %d3, here; mov.b64 %pol, 0;\n{values}\nst.{dots(how, v, 'b32')} [{at}+32], {vec}{hint};\n{back}"  # fmt: skip
    decls = ".reg .b32 %s, %r<9>; .reg .b64 %pol, %d<4>; .local .align 16 .b8 here[128];\n.shared .align 16 .b8 buf[128];"
    launch(kernel(body, 1, decls), [y], block=1)
    assert y[8 : 8 + n].tolist() == [100 + i for i in range(n)] and not y[:8].any()


ATOMICS = ["", "relaxed.cta.global", "acquire.gpu.global", "release.sys.global", "acq_rel.gpu.global", "relaxed.cluster.shared::cluster", "acq_rel.cta.shared::cta", "gpu", "global", "shared::cta"]  # fmt: skip


@pytest.mark.parametrize("how", ATOMICS)
@pytest.mark.parametrize("hint", ["", "L2::cache_hint"])
def test_atom_and_red(how, hint):
    """32 lanes add to one word: old values are a permutation of the partial sums, the total is exact."""
    if hint and "shared" in how:
        return
    y = aligned(np.zeros(64, np.uint32))
    shared = "shared" in how
    at = "%s" if shared else "%p0"
    body = f"""mov.u32 %s, buf; mov.b64 %pol, 0; mov.u32 %r0, %laneid; setp.eq.u32 %q, %r0, 0; @%q st.shared.v2.u32 [%s], {{0, 0}}; bar.sync 0;
    atom.{dots(how, 'add', hint, 'u32')} %r1, [{at}], 3{', %pol' if hint else ''}; {{RED}}
    mad.wide.u32 %d, %r0, 4, %p0; st.global.u32 [%d+128], %r1; bar.sync 0;
    """ + ("ld.shared.v2.u32 {%r1, %r2}, [%s]; @%q st.global.v2.u32 [%p0], {%r1, %r2};" if shared else "")  # fmt: skip
    red = how.replace("acquire.", "relaxed.").replace("acq_rel.", "release.")
    body = body.replace("{RED}", f"red.{dots(red, 'add', hint, 'u32')} [{at}+4], 5{', %pol' if hint else ''};")  # fmt: skip
    launch(kernel(body, 1, ".reg .b32 %s, %r<4>; .reg .b64 %d, %pol; .reg .pred %q; .shared .align 16 .b8 buf[16];"), [y])  # fmt: skip
    assert y[0] == 96 and y[1] == 160 and sorted(y[32:]) == [3 * i for i in range(32)]


@pytest.mark.parametrize("v,t", [("v2", "f32"), ("v4", "f32"), ("v2", "f16"), ("v4", "bf16"), ("v8", "f16"), ("v2", "f16x2"), ("v4", "bf16x2")])  # fmt: skip
def test_vector_red(v, t):
    """Integers small enough to be exact in every type; each element gets its own."""
    n, half = int(v[1:]), "f16" in t
    y = aligned(np.zeros(8, np.uint32))
    size = 2 if t in ("f16", "bf16") else 4
    regs = [f"%x{i}" for i in range(n)]
    to = {"f16": lambda k: int(np.float16(k).view(np.uint16)), "bf16": lambda k: int(F(k).view(U)) >> 16, "f32": lambda k: int(F(k).view(U))}  # fmt: skip
    code = to[t.removesuffix("x2")]
    bits = [code(i + 1) | (code(i + 2) << 16 if t.endswith("x2") else 0) for i in range(n)]
    body = "\n".join(f"mov.b{8 * size} {r}, {b};" for r, b in zip(regs, bits))
    body += f"\nred.global.add.{'noftz.' if half else ''}{v}.{t} [%p0], {{{', '.join(regs)}}};"
    launch(kernel(body, 1, f".reg .b{8 * size} {', '.join(regs)};"), [y], grid=3, block=1)
    step = size if not t.endswith("x2") else 2
    got = y.view(np.uint8)[: n * size].view({2: np.uint16, 4: np.uint32}[step])
    per = [(i + 1, i + 2) if t.endswith("x2") else (i + 1,) for i in range(n)]
    assert got.tolist() == [code(3 * k) for pair in per for k in pair]


def test_128_bit_atomics_have_no_form():
    with pytest.raises(emulator.PtxError, match="unknown instruction form atom.global.exch.b128"):
        emulator.Module.from_ptx(kernel("atom.global.exch.b128 %v, [%p0], %v;", 1, ".reg .b128 %v;"))  # fmt: skip


@pytest.mark.parametrize("space", ["shared", "shared::cta", ""])
@pytest.mark.parametrize("trans", ["", "trans"])
def test_matrix_loads_and_stores_by_name_and_generic_address(space, trans):
    """Eight rows of eight 16-bit elements: thread t holds elements 2(t % 4) and the next of row t / 4, or of the transpose."""
    m = np.arange(64, dtype=np.uint16).reshape(8, 8)
    x, y = aligned(m), aligned(np.zeros(96, np.uint32))
    generic = "cvt.u64.u32 %at, %s; cvta.shared.u64 %at, %at;" if not space else ""
    at = "%at" if not space else "%s"
    body = f"""mov.u32 %t, %laneid; mov.u32 %s, buf; mad.wide.u32 %d, %t, 4, %p0; ld.global.u32 %r, [%d]; mad.lo.u32 %s, %t, 4, %s; st.shared.u32 [%s], %r;
    bar.warp.sync -1; and.b32 %u, %t, 7; mov.u32 %s, buf; mad.lo.u32 %s, %u, 16, %s; {generic}
    ldmatrix.sync.aligned.m8n8.x1.{dots(trans, space, "b16")} %r, [{at}]; mad.wide.u32 %d, %t, 4, %p1; st.global.u32 [%d], %r;
    add.u32 %s, %s, 128; {generic}
    stmatrix.sync.aligned.m8n8.x1.{dots(trans, space, "b16")} [{at}], {{%r}}; bar.warp.sync -1;
    mov.u32 %s, buf; mad.lo.u32 %s, %t, 4, %s; ld.shared.u32 %r, [%s+128]; st.global.u32 [%d+128], %r;"""
    launch(kernel(body, 2, ".reg .b32 %t, %s, %u, %r; .reg .b64 %d, %at; .shared .align 16 .b8 buf[256];"), [x, y])  # fmt: skip
    frag = (m.T if trans else m).reshape(8, 4, 2).astype(U)
    assert (y[:32].reshape(8, 4) == (frag[..., 0] | frag[..., 1] << 16)).all()
    assert (y[32:64].view(np.uint16).reshape(8, 8) == m).all(), "a store of what was loaded gives the matrix back"  # fmt: skip


# ---- addresses -------------------------------------------------------------------------------------------------------
def test_address_spaces():
    """cvta there and back, and isspacep of each kind of address. A constant is none of the windows: its space is not modelled."""
    y = np.zeros(64, np.uint32)
    spaces = ("global", "local", "param", "shared", "shared::cta", "shared::cluster", "const")
    regs = {"g": "mov.b64 %g, %p0;", "l": "mov.u64 %l, here; cvta.local.u64 %l, %l;", "s": "mov.u64 %s, buf; cvta.shared.u64 %s, %s;", "k": "mov.b64 %k, p0; cvta.param.u64 %k, %k;",
            "r": "mov.u64 %r, buf; mapa.shared::cluster.u64 %r, %r, 1; cvta.shared::cluster.u64 %r, %r;"}  # fmt: skip
    body, at = "\n".join(regs.values()), 0
    for reg, space in itertools.product(regs, spaces):
        body += f"\nisspacep.{space} %q, %{reg}; selp.u32 %v, 1, 0, %q; st.global.u32 [%p0+{4 * at}], %v;"
        at += 1
    decls = ".reg .b64 %g, %l, %s, %k, %r; .reg .b32 %v; .reg .pred %q; .local .b8 here[8]; .shared .b8 buf[8];"
    launch(kernel(body, 1, decls), [y], grid=2, block=1, cluster=2)
    got = {reg: dict(zip(spaces, y[7 * i : 7 * i + 7].tolist())) for i, reg in enumerate(regs)}
    assert {k for k, v in got["g"].items() if v} == {"global"}
    assert {k for k, v in got["l"].items() if v} == {"local"}
    assert {k for k, v in got["k"].items() if v} == {"param"}
    assert {k for k, v in got["s"].items() if v} == {"shared", "shared::cta", "shared::cluster"}
    # rank 1's bytes: shared::cluster everywhere, shared::cta in CTA 1 only; the last writer of y is either CTA
    assert got["r"]["shared::cluster"] == 1 and not got["r"]["global"]


@pytest.mark.parametrize("space", ["global", "local", "shared", "shared::cta", "shared::cluster", "param", "const"])  # fmt: skip
@pytest.mark.parametrize("t", ["u64", "u32"])
def test_cvta_to_undoes_cvta(space, t):
    if t == "u32" and space in ("global", "const"):
        return
    var = {"global": "%p0", "local": "here", "param": "p0", "const": "fixed"}.get(space, "buf")
    y = np.zeros(2, np.uint64)
    body = f"mov.u64 %a, {var}; cvta.{space}.u64 %b, %a; cvta.to.{space}.u64 %c, %b; sub.u64 %c, %c, %a; st.global.u64 [%p0], %c;"
    if t == "u32":
        body = f"mov.u32 %r, {var}; cvta.{space}.u32 %r1, %r; cvta.to.{space}.u32 %r1, %r1; sub.u32 %r, %r1, %r; cvt.u64.u32 %c, %r; st.global.u64 [%p0], %c;"  # fmt: skip
    body += "\nmov.b64 %b, 1; st.global.u64 [%p0+8], %b;"
    decls = ".reg .b64 %a, %b, %c; .reg .b32 %r, %r1; .local .b8 here[8]; .shared .b8 buf[8];"
    launch(kernel(body, 1, decls, module=".const .b32 fixed = 1;"), [y], block=1)
    assert y.tolist() == [0, 1]


@pytest.mark.parametrize("space", ["", "shared::cluster"])
@pytest.mark.parametrize("t", ["u32", "u64"])
def test_mapa_and_getctarank(space, t):
    y = np.zeros((2, 4), np.uint32)
    r = "%a" if t == "u32" else "%d"
    generic = f"cvta.shared.{t} {r}, {r};" if not space else ""
    body = f"""mov.u32 %c, %cluster_ctarank; xor.b32 %o, %c, 1; mov.{t} {r}, buf; {generic}
    mapa.{dots(space, t)} {r}, {r}, %o; getctarank.{dots(space, t)} %g, {r}; {"mov.b32 %x, %a;" if t == "u32" else "cvt.u32.u64 %x, %d;"}
    st.shared::cluster.u32 [%x], %c; barrier.cluster.arrive; barrier.cluster.wait; ld.shared.u32 %x, [buf];
    mad.wide.u32 %e, %c, 16, %p0; st.global.v2.u32 [%e], {{%g, %x}};"""
    launch(kernel(body, 1, ".reg .b32 %a, %c, %o, %g, %x; .reg .b64 %d, %e; .shared .align 4 .b8 buf[4];"), [y], grid=2, block=1, cluster=2)  # fmt: skip
    assert y[:, :2].tolist() == [[1, 1], [0, 0]]


# ---- warps and control -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op,f", [("min", np.fmin.reduce), ("max", np.fmax.reduce)])
@pytest.mark.parametrize("mod,nan", list(itertools.product(("", "abs"), ("", "NaN"))))
def test_redux_f32(op, f, mod, nan):
    for x in (floats(1, special=False), np.where(LANE == 7, F(np.nan), floats(2, special=False)), np.array([0.0, -0.0] * 16, F), np.full(32, np.nan, F)):  # fmt: skip
        got = one(f"{dots('redux.sync', op, mod, nan, 'f32')} %o0, %a0, -1;", [x])
        v = np.abs(x) if mod else x
        want = F(np.nan) if np.isnan(v).all() or (nan and np.isnan(v).any()) else f(v)
        if want == 0:  # the order of zeros: -0 < +0
            want = F(-0.0) if not mod and op == "min" else F(0.0)
        assert (got == (0x7FFFFFFF if np.isnan(want) else want.view(U))).all()
    half = "setp.lt.u32 %q, %a1, 16; @!%q bra X; redux.sync.max.f32 %o0, %a0, 0xFFFF; X:"
    x = LANE.astype(F)
    assert (one(half, [x, LANE], decls=".reg .pred %q;")[:16] == F(15).view(U)).all()


@pytest.mark.parametrize("line", [
    "ret.uni;", "exit;", "@%q ret;", "exit.uni;", "griddepcontrol.wait;", "griddepcontrol.launch_dependents;", "pmevent 3;", "pmevent.mask 5;", "setmaxnreg.inc.sync.aligned.u32 232;", "setmaxnreg.dec.sync.aligned.u32 24;",
    "membar.cta;", "membar.gl;", "membar.sys;", "prefetchu.L1 [%p0];", "prefetch.L1 [%p0];", *(f"prefetch.{s}.{c} [%p0];" for s in ("global", "local") for c in ("L1", "L2")), "prefetch.global.L2::evict_last [%p0];", "prefetch.global.L2::evict_normal [%p0];",
    "prefetch.tensormap [%p0];", "prefetch.param.tensormap [p0];", "prefetch.const.tensormap [%p0];", "applypriority.global.L2::evict_normal [%p0], 128;", "applypriority.L2::evict_normal [%p0], 128;", "discard.global.L2 [%p0], 128;", "discard.L2 [%p0], 128;",
    *(f"fence{s}.{c};" for s in ("", ".sc", ".acq_rel", ".acquire", ".release") for c in SCOPES), "fence.mbarrier_init.release.cluster;", *(f"fence.proxy.{k};" for k in ("alias", "async", "async.global", "async.shared::cta", "async.shared::cluster")),
    *(f"fence.proxy.tensormap::generic.release.{c};" for c in SCOPES), *(f"fence.proxy.tensormap::generic.acquire.{c} [%p0], 128;" for c in SCOPES),
    *(f"createpolicy.fractional.L2::{c}.b64 %pol, 0.5;" for c in ("evict_last", "evict_normal", "evict_first", "evict_unchanged")), *(f"createpolicy.fractional.L2::evict_last.L2::{c}.b64 %pol, 0.5;" for c in ("evict_first", "evict_unchanged")),
    "cp.async.bulk.prefetch.L2.global [%p0], 128;", "cp.async.bulk.prefetch.L2.global.L2::cache_hint [%p0], 128, %pol;", "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;", "nanosleep.u32 20;", "bra.uni N;\nN:",
    "barrier.cta.arrive 2, 64; barrier.cta.sync 2, 64;" , "bar.cta.arrive 2, 64; bar.cta.sync 2, 64;",
])  # fmt: skip
def test_what_has_no_effect_on_values(line):
    """Accepted, and what stands behind it runs once per thread, unless the line ends the kernel."""
    y = np.zeros(33, np.uint32)
    if "arrive 2" in line:  # 32 threads arrive, 32 wait: the warp itself is both
        line = line.replace("64", "64")
    body = f"mov.u32 %t, %laneid; setp.ge.u32 %q, %t, 0; mov.b64 %pol, 0; red.global.add.u32 [%p0], 1;\n{line}\nred.global.add.u32 [%p0+4], 1;"  # fmt: skip
    launch(kernel(body, 1, ".reg .b32 %t; .reg .pred %q; .reg .b64 %pol;"), [y])
    ends = line.split()[0].rstrip(";") in ("ret.uni", "exit", "exit.uni") or "ret" in line.split(";")[0].split()[-1:]  # fmt: skip
    assert y[0] == 32 and y[1] == (0 if ends else 32)


@pytest.mark.parametrize("op", ["trap", "brkpt"])
def test_trap(op):
    with pytest.raises(emulator.EmulatorError, match=rf"line \d+: {op}: \[trap\]"):
        launch(kernel(f"{op};", 0), [])


@pytest.mark.parametrize("line", ["setmaxnreg.inc.sync.aligned.u32 20;", "setmaxnreg.dec.sync.aligned.u32 100;", "setmaxnreg.inc.sync.aligned.u32 264;"])  # fmt: skip
def test_setmaxnreg_counts(line):
    with pytest.raises(emulator.PtxError, match="24..256 in steps of 8"):
        launch(kernel(line, 0), [])


@pytest.mark.parametrize("form", ["bar.red.{}", "bar.cta.red.{}", "barrier.red.{}", "barrier.cta.red.{}", "barrier.red.{}.aligned", "barrier.cta.red.{}.aligned"])  # fmt: skip
@pytest.mark.parametrize("n", [0, 5, 64])
def test_barrier_reductions(form, n):
    """96 threads, the predicate holds for the first n."""
    y = np.zeros((96, 4), np.uint32)

    def op(name, t):
        return (form.format(name) if "aligned" not in form else form.split(".{}")[0] + f".{name}.aligned") + f".{t}"  # fmt: skip

    body = f"""mov.u32 %t, %tid.x; setp.lt.u32 %q, %t, {n}; {op("popc", "u32")} %a, 1, %q; {op("and", "pred")} %r, 2, 96, %q; selp.u32 %b, 1, 0, %r;
    {op("or", "pred")} %r, 3, 96, %q; selp.u32 %c, 1, 0, %r; mad.wide.u32 %d, %t, 16, %p0; st.global.v4.u32 [%d], {{%a, %b, %c, %t}};"""
    launch(kernel(body, 1, ".reg .b32 %t, %a, %b, %c; .reg .pred %q, %r; .reg .b64 %d;"), [y], block=96)  # fmt: skip
    assert (y == np.stack([np.full(96, n), np.full(96, n == 96), np.full(96, n > 0), np.arange(96)], -1)).all()  # fmt: skip
