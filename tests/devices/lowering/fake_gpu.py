"""A GPU of any compute capability that is not there: torch's compiler makes Triton code for it, and Triton machine code.

Importing this changes torch for the whole process. It registers a device type `gpu` whose tensors exist as fakes only, and
answers what Inductor asks a CUDA device, such as its capability and shared memory. Nothing can be run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo.device_interface as device_interface
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.runtime.triton_heuristics as triton_heuristics
import torch._inductor.scheduler
import torch._inductor.utils as inductor_utils
import torch.utils._triton
import triton
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen import common
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.graph import GraphLowering
from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.utils import backend_registration
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from polyhead.kernels.flex import kernel, support

NAME = "gpu"
# the most shared memory that a block may use, in bytes (CUDA C++ Programming Guide, table of compute capabilities)
SHARED_MEMORY = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448}

_now = SimpleNamespace(arch=80)


def properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="fake",
        major=_now.arch // 10,
        minor=_now.arch % 10,
        multi_processor_count=108,
        warp_size=32,
        total_memory=40 << 30,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=SHARED_MEMORY[_now.arch],
        shared_memory_per_multiprocessor=SHARED_MEMORY[_now.arch] + 1024,
        L2_cache_size=40 << 20,
        gcnArchName="",
        is_integrated=0,
    )


class _Interface(device_interface.DeviceInterface):
    """What torch's compiler asks a device."""

    class Worker:
        set_device = staticmethod(lambda device: None)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(properties)

    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    set_device = staticmethod(lambda device: None)
    synchronize = staticmethod(lambda *device: None)
    exchange_device = maybe_exchange_device = get_raw_stream = staticmethod(lambda device: 0)
    memory_allocated = staticmethod(lambda device=None: 0)
    get_device_properties = staticmethod(properties)
    get_compute_capability = staticmethod(lambda device=None: _now.arch)
    is_available = triton_supported = staticmethod(lambda: True)
    is_bf16_supported = is_dtype_supported = staticmethod(lambda *args, **kwargs: True)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)


class _Driver:
    """What Triton asks its driver."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[_now.arch]})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", _now.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device(NAME, 0)


class _Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _install() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    for name in (NAME, f"{NAME}:0"):
        device_interface.register_interface_for_device(name, _Interface)
    triton.runtime.driver.set_active(_Driver())
    common.register_backend_for_device(NAME, TritonScheduling, PythonWrapperCodegen)
    common.register_device_op_overrides(NAME, CUDADeviceOpOverrides())
    inductor_utils.GPU_TYPES.append(NAME)
    InductorChoices.get_config_heuristics = lambda self, device_type=None: CUDAConfigHeuristic()
    torch.cuda.get_device_capability = lambda device=None: divmod(_now.arch, 10)
    torch.cuda.get_device_properties = properties
    FakeTensorMode.avoid_device_init = property(lambda self: True)
    flex_attention._validate_device = lambda *tensors: None
    # torch looks for Triton on the types of devices that it knows
    torch.utils._triton.has_triton = lambda *args: True
    for module in [module for name, module in sys.modules.items() if name.startswith("torch._inductor")]:
        if hasattr(module, "has_triton"):
            module.has_triton = lambda *args: True
    inductor_config.joint_graph_constant_folding = False
    inductor_config.compile_threads = 1
    inductor_config.fx_graph_cache = False
    # the backward pass is lowered with the forward pass, not when it runs
    functorch_config.force_non_lazy_backward_lowering = True
    support.DEVICE_TYPES = (NAME,)
    kernel.shared_memory_per_block = lambda device: SHARED_MEMORY[_now.arch]


_install()
DEVICE = torch.device(NAME, 0)


class _Lowered(Exception):
    """Raised where compiled code would run."""


def lower(arch: int, call: Any) -> dict[str, str]:
    """The Triton source of each kernel that Inductor makes for `call()`, forward and backward, by name."""
    _now.arch = arch
    codes: list[str] = []

    def stop_at_module(self: GraphLowering) -> Any:
        code, _ = self.codegen()
        codes.append(code.value)

        def run(*args: Any, **kwargs: Any) -> None:
            raise _Lowered

        return SimpleNamespace(call=run)

    torch._dynamo.reset()
    with mock.patch.object(GraphLowering, "compile_to_module", stop_at_module), contextlib.suppress(_Lowered):
        call()
    found = [re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", code, re.DOTALL) for code in codes]
    return {f"{at}:{name}": source for at, kernels in enumerate(found) for name, source in kernels}


def compile_kernel(arch: int, source: str) -> Any:
    """The machine code of one of these kernels for an architecture, with what it needs (`metadata.shared`)."""
    _now.arch = arch
    made: dict[str, Any] = {}

    def remember(*args: Any, **options: Any) -> Any:
        def decorate(function: Any) -> Any:
            made.update(function=function, options=options)
            return function

        return decorate

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(triton_heuristics, "template", remember):
        file = Path(folder) / "kernel.py"
        file.write_text(source, encoding="utf-8")
        specification = importlib.util.spec_from_file_location("kernel", file)
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        options = made["options"]
        signature = options["triton_meta"]["signature"]
        constants = dict(options["triton_meta"].get("constants", {}))
        return triton.compile(
            ASTSource(fn=made["function"], signature=signature, constexprs=constants),
            target=GPUTarget("cuda", arch, 32),
            options={
                "num_warps": options["num_warps"],
                "num_stages": options["num_stages"],
                # Triton's default, about which it warns
                "enable_fp_fusion": True,
            },
        )
