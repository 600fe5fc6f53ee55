"""The CUDA-driver executor on a GPU that cannot run the sm_100 kernels: tensor maps, errors, and a stand-in kernel.

Run on a Hopper GPU with the C++ operators built; not part of make test.
"""

import re
import threading

import pytest
import torch
from kernels import stand_in, stand_in_bwd, test_backward_record
from kernels.test_host_record import ARGUMENTS, SWEEP, draw, problem_of

from flash_attn_mx import _native, layouts, sm100

pytestmark = [
    pytest.mark.gpu_sm90,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(bool(sm100.WHY_NO_HOST), reason=sm100.WHY_NO_HOST or "loaded"),
]
TILES = [(64, 64), (64, 48), (128, 128), (128, 72)]


@pytest.fixture
def image(tmp_path, request):
    """Path of the stand-in for tiles of the test's tile_dim."""
    tile_dim = (
        request.node.callspec.params.get("tile_dim", 64)
        if hasattr(request.node, "callspec")
        else 64
    )
    path = tmp_path / f"stand_in_{tile_dim}.ptx"
    path.write_text(stand_in.ptx(stand_in.Loaded(columns=tile_dim)))
    return str(path)


def instance_for(head_dim):
    return sm100.Instance("attn_fwd", 64 if head_dim <= 64 else 128, torch.bfloat16)


def assert_encoded(record):
    """Every map was filled in, and begins with its address."""
    for m in record["maps"]:
        encoded = record["params"][m["offset"] : m["offset"] + 128]
        assert int.from_bytes(encoded[:8], "little") == m["address"]
        assert any(encoded[8:])


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)], ids=str)
@pytest.mark.parametrize(
    "batch,seqlen_q,seqlen_k,heads,heads_k,head_dim", SWEEP + [(2, 70000, 70000, 2, 1, 128)]
)
def test_driver_accepts_dense_maps(batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, window):
    shapes = (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads_k, head_dim)
    problem = problem_of(*(x.cuda() for x in draw(*shapes)), window)
    assert_encoded(sm100.record_of(problem, instance_for(head_dim), executor="encode"))


@pytest.mark.parametrize("head_dim", [*range(1, 129, 9), 16, 32, 64, 96, 112])
def test_driver_accepts_maps_of_every_head_dim(head_dim):
    problem = problem_of(
        *(x.cuda() for x in draw((1, 33, 3, head_dim), (1, 65, 1, head_dim))), (-1, 0)
    )
    assert_encoded(sm100.record_of(problem, instance_for(head_dim), executor="encode"))


def test_driver_accepts_maps_of_packed_and_transposed_operands():
    cu = torch.tensor([0, 5, 300, 300], dtype=torch.int32, device="cuda")
    q, k, v = (x.cuda() for x in draw((310, 4, 64), (310, 2, 64)))
    problem = problem_of(q, k, v, (-1, 0), cu_q=cu, cu_k=cu, max_q=295, max_k=295)
    assert_encoded(sm100.record_of(problem, instance_for(64), executor="encode"))
    dense = problem_of(*(x.unsqueeze(0) for x in (q, k, v)))
    arguments = list(dense.arguments)
    arguments[0] = arguments[0].transpose(1, 2).contiguous().transpose(1, 2)
    record = sm100.record_of(
        dense._replace(arguments=tuple(arguments)), instance_for(64), executor="encode"
    )
    assert record["maps"][0]["strides_bytes"][0] == 64  # tokens are neighbours
    assert_encoded(record)


# --- launching ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel",
    [k for k in _native.kernels() if k.name.startswith("attn_fwd_d")],
    ids=lambda k: k.name,
)
def test_launch_reports_that_the_device_is_not_sm100(kernel):
    """The error names the call, the kernel, both capabilities and CUDA's code; the device goes on working."""
    capability = torch.cuda.get_device_capability()
    if capability[0] == 10:
        pytest.skip("the device runs the kernels")
    instance = next(row for row in sm100.INSTANCES if row.name == kernel.name)
    problem = problem_of(
        *(x.cuda() for x in draw((1, 40, 1, 64), (1, 40, 1, 64))), out_dtype=instance.out_dtype
    )
    with pytest.raises(RuntimeError) as caught:
        sm100.launch(problem, instance, image=str(kernel.fatbin))
    found = re.search(
        rf"flash_attn_mx: cu\w+ \({kernel.name}, built for capability 10.x, on a device of capability "
        rf"{capability[0]}\.{capability[1]}\): CUDA_ERROR_\w+ = \d+, ",
        str(caught.value),
    )
    assert found, caught.value
    print(found[0])
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_backend_refuses_the_device_first():
    """Users meet NotImplementedError of the Python side, not the driver's."""
    import flash_attn_mx as famx

    if torch.cuda.get_device_capability()[0] == 10:
        pytest.skip("the device runs the kernels")
    x = torch.randn(1, 40, 1, 64, device="cuda")
    with pytest.raises(NotImplementedError, match="backend 'sm100': cuda:0 has capability"):
        famx.flash_attn_func(x, x, x, backend="sm100")
    with pytest.raises(NotImplementedError, match="the emulator takes CPU tensors"):
        famx.flash_attn_func(x, x, x, backend="emulator")


def test_missing_or_broken_image(tmp_path):
    problem = stand_in.problem(64, "cuda")
    with pytest.raises(RuntimeError, match="cannot read the device code .*nowhere"):
        sm100.launch(problem, stand_in.instance(64), image=str(tmp_path / "nowhere"))
    (tmp_path / "broken").write_text("no code\n")
    with pytest.raises(RuntimeError, match=r"flash_attn_mx: cuLibrary\w+ \(stand_in.*CUDA_ERROR"):
        sm100.launch(problem, stand_in.instance(64), image=str(tmp_path / "broken"))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("tile_dim,head_dim", TILES)
def test_stand_in_kernel_finds_its_parameters(tile_dim, head_dim, packed, image):
    """Grid, shared memory, scalars, pointers and the tensor map arrive, as in the emulator."""
    problem = stand_in.problem(head_dim, "cuda", packed)
    sm100.launch(problem, stand_in.instance(tile_dim), image)
    stand_in.check(problem, tile_dim)


def test_launch_follows_the_current_stream(image):
    """Work queued on a side stream is waited for, and the default stream is not touched."""
    problem = stand_in.problem(64, "cuda")
    q = problem.arguments[0].view(torch.uint8)
    want = q.clone()
    q.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q.copy_(want)
        sm100.launch(problem, stand_in.instance(64), image)
    stream.synchronize()
    stand_in.check(problem, 64)


def test_launch_in_a_graph(image):
    """The first launch of a kernel, its loading included, may happen during capture; replays see new data."""
    problem = stand_in.problem(64, "cuda")
    q = problem.arguments[0].view(torch.uint8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sm100.launch(problem, stand_in.instance(64), image)
    for _ in range(2):
        q.copy_(q.flip(1))
        problem.out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        stand_in.check(problem, 64)


def test_nothing_waits_for_the_device(image):
    """Preparation of packed operands and launch under torch's synchronisation alarm."""
    x = torch.randn(200, 2, 64, device="cuda")
    cu = torch.tensor([0, 200], dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem = problem_of(x, x, x, (-1, 0), torch.float32, cu, cu, 200, 200)
        sm100.launch(problem, stand_in.instance(64), image)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_launch_from_a_new_thread(image):
    """A thread that has not used CUDA has no current context."""
    problem = stand_in.problem(64, "cuda")
    errors = []

    def run():
        try:
            sm100.launch(problem, stand_in.instance(64), image)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    stand_in.check(problem, 64)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launch_on_the_device_of_the_tensors(image):
    """Tensors on device 1 while device 0 is current; afterwards it still is."""
    problem = stand_in.problem(64, "cuda:1")
    sm100.launch(problem, stand_in.instance(64), image)
    torch.cuda.synchronize(1)
    stand_in.check(problem, 64)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("axis", ["rowwise", "colwise"])
def test_packed_atoms_on_the_gpu_are_those_of_the_cpu(axis):
    cu = torch.tensor([0, 0, 130, 131, 300], dtype=torch.int32)
    rows = 310 if axis == "rowwise" else layouts.packed_scale_rows(310, 4)
    scale = torch.randint(0, 255, (rows, 3, 2 if axis == "rowwise" else 64), dtype=torch.uint8)
    scale = scale.view(torch.float8_e8m0fnu)
    want, got = (
        layouts.packed_atoms(scale.to(d), axis, cu.to(d), 310).cpu() for d in ("cpu", "cuda")
    )
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("argument", ["q_scale", "v_tok", "v_tok_scale", "lse", "cu_seqlens_q"])
def test_operator_refuses_tensors_of_another_device(argument):
    cu = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    x = torch.randn(40, 1, 64, device="cuda")
    problem = problem_of(x, x, x, (-1, 0), cu_q=cu, cu_k=cu, max_q=40, max_k=40)
    arguments = list(problem.arguments)
    at = ARGUMENTS.index(argument)
    arguments[at] = arguments[at].cpu()
    with pytest.raises(RuntimeError, match="device"):
        sm100.record_of(problem._replace(arguments=tuple(arguments)), instance_for(64))


# --- the backward ------------------------------------------------------------------------------------------------
# Its two passes use nothing that Hopper lacks: their shipped PTX runs here, retargeted, around a stand-in for attn_bwd.


def backward_problem(batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, **options):
    """Made on the CPU, moved here before the operands are brought into the kernels' form."""
    tensors = test_backward_record.draw(
        (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads_k, head_dim)
    )
    return test_backward_record.problem_of([x.cuda() for x in tensors], **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "batch,seqlen_q,seqlen_k,heads,heads_k,head_dim", SWEEP + [(1, 20000, 20000, 2, 1, 128)]
)
def test_driver_accepts_backward_maps(batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, causal):
    problem = backward_problem(batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, causal=causal)
    instance = test_backward_record.instance_for(head_dim)
    for record in sm100.backward_records(problem, instance, executor="encode"):
        assert_encoded(record)
        assert len(record["maps"]) == (7 if record["kernel"] == "main" and seqlen_k else 0)


@pytest.mark.parametrize("head_dim", [*range(1, 129, 9), 16, 32, 64, 96, 112])
def test_driver_accepts_backward_maps_of_every_head_dim(head_dim):
    problem = backward_problem(1, 33, 65, 3, 1, head_dim)
    instance = test_backward_record.instance_for(head_dim)
    for record in sm100.backward_records(problem, instance, executor="encode"):
        assert_encoded(record)


@pytest.fixture
def backward(tmp_path):
    """backward(tile_dim, head_dim, ...): a problem on the GPU, and the three images that run it here."""

    def make(tile_dim, head_dim, packed=False, tensor_map="q"):
        problem = stand_in_bwd.problem(head_dim, tile_dim, "cuda", packed)
        major, minor = torch.cuda.get_device_capability()
        target = f"sm_{major}{minor}"
        return problem, stand_in_bwd.write(tmp_path, problem, tile_dim, tensor_map, target)

    return make


@pytest.mark.parametrize("tensor_map", stand_in_bwd.MAPS)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("tile_dim,head_dim", TILES)
def test_backward_passes_and_stand_in(tile_dim, head_dim, packed, tensor_map, backward):
    """Three launches in order: delta and bias of the real preprocess, a box through each map, dQ of the real postprocess."""
    problem, images = backward(tile_dim, head_dim, packed, tensor_map)
    sm100.launch_backward(problem, stand_in_bwd.instance(tile_dim), images)
    stand_in_bwd.check(problem, tile_dim, tensor_map)


def test_backward_in_a_graph(backward):
    """Captured from the first launch on; a replay sees new data and clears its own sums."""
    problem, images = backward(64, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sm100.launch_backward(problem, stand_in_bwd.instance(64), images)
    q = problem.arguments[4].view(torch.uint8)
    for _ in range(2):
        q.copy_(q.flip(1))
        for x in (*problem.scratch, *problem.grads):
            x.view(torch.uint8).fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        stand_in_bwd.check(problem, 64, "q")


def test_c27_scratch_belongs_to_the_graph(backward):
    """C27: of two graphs captured on one stream one dies; the other still finds its scratch and its results."""
    _, images = backward(64, 64)
    inputs = stand_in_bwd.inputs(64, "cuda")

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            problem = stand_in_bwd.prepared(inputs, 64)
            sm100.launch_backward(problem, stand_in_bwd.instance(64), images)
        return graph, problem

    graph, problem = capture()
    other = capture()
    del other
    torch.cuda.empty_cache()
    filler = torch.full((1 << 26,), float("nan"), device="cuda")  # takes what was freed
    graph.replay()
    torch.cuda.synchronize()
    stand_in_bwd.check(problem, 64, "q")
    assert filler.isnan().all()


def test_backward_does_not_wait_for_the_device(backward):
    """Quantising, preparation of packed operands, scratch and launches under torch's synchronisation alarm."""
    _, images = backward(128, 72, packed=True)
    inputs = stand_in_bwd.inputs(72, "cuda", packed=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem = stand_in_bwd.prepared(inputs, 128)
        sm100.launch_backward(problem, stand_in_bwd.instance(128), images)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    stand_in_bwd.check(problem, 128, "q")


@pytest.mark.parametrize(
    "instance", sm100.BACKWARD_INSTANCES, ids=lambda x: f"{x.main}-{x.preprocess[-4:]}"
)
@pytest.mark.parametrize("refused", [0, 1])
def test_backward_launch_reports_that_the_device_is_not_sm100(refused, instance, tmp_path):
    """By its first launch, and by the main one where the first would run."""
    capability = torch.cuda.get_device_capability()
    if capability[0] == 10:
        pytest.skip("the device runs the kernels")
    problem = backward_problem(1, 40, 40, 1, 1, instance.head_dim)
    images = [str(next(k.fatbin for k in _native.kernels() if k.name == n)) for n in instance.names]
    if refused == 1:
        path = tmp_path / "pre.ptx"
        text = (_native.DEVICE / f"{instance.preprocess}.sm_100f.ptx").read_text()
        path.write_text(
            text.replace(".target sm_100f", f".target sm_{capability[0]}{capability[1]}")
        )
        images[0] = str(path)
    with pytest.raises(RuntimeError) as caught:
        sm100.launch_backward(problem, instance, images)
    found = re.search(
        rf"flash_attn_mx: cu\w+ \({instance.names[refused]}, built for capability 10.x, on a device of capability "
        rf"{capability[0]}\.{capability[1]}\): CUDA_ERROR_\w+ = \d+, ",
        str(caught.value),
    )
    assert found, caught.value
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.parametrize(
    "argument", ["dout_col", "k_scale", "v_tok_scale", "lse", "bias", "dq_acc", "dk"]
)
def test_backward_operator_refuses_tensors_of_another_device(argument):
    problem = backward_problem(1, 40, 40, 1, 1, 64)
    arguments = list(problem.arguments)
    at = test_backward_record.ARGUMENTS.index(argument)
    arguments[at] = arguments[at].cpu()
    with pytest.raises(RuntimeError, match="device"):
        sm100.backward_records(
            problem._replace(arguments=tuple(arguments)), test_backward_record.instance_for(64)
        )
