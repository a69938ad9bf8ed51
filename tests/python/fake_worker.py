"""A worker of one rank in Python: the worker protocol with a small torch engine behind it.

The double of the package's unit tests: real gRPC, real shared memory, no controller and no MPI. It keeps
`retention_rate` of every expert's pairs, by LRM score. `python fake_worker.py SOCKET [RETENTION]` serves until killed.
"""

import itertools
import math
import mmap
import os
import socket as sockets
import sys
import threading
from concurrent import futures

import grpc
import torch

from lrmoe import protocol as wire

DTYPES = {wire.DATA_TYPE_BF16: torch.bfloat16, wire.DATA_TYPE_FP32: torch.float32, wire.DATA_TYPE_INT32: torch.int32,
          wire.DATA_TYPE_UINT8: torch.uint8}


class Refused(Exception):
    def __init__(self, code, message):
        super().__init__(message)
        self.code, self.message = code, message


def refuse(message, code=grpc.StatusCode.INVALID_ARGUMENT):
    raise Refused(code, message)


class Expert:
    def __init__(self, gate_up, down):
        self.master = [gate_up.float().clone(), down.float().clone()]
        self.gradient = [torch.zeros_like(w) for w in self.master]
        self.moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in self.master]

    def update(self, r):
        for w, g, (m, v) in zip(self.master, self.gradient, self.moments):
            g = g * r.gradient_scale
            w.mul_(1 - r.lr * r.weight_decay)
            m.mul_(r.beta1).add_(g, alpha=1 - r.beta1)
            v.mul_(r.beta2).addcmul_(g, g, value=1 - r.beta2)
            denominator = (v.sqrt() / math.sqrt(1 - r.beta2 ** r.step)).add_(r.eps)
            w.addcdiv_(m, denominator, value=-r.lr / (1 - r.beta1 ** r.step))


class FakeWorker:
    """Handlers by method name. All state behind one lock, as a worker has one loop."""

    def __init__(self, retention_rate=1.0, ended=None):
        self.retention_rate = retention_rate
        self.lock = threading.RLock()
        self.ended = ended or threading.Event()
        self.model = None
        self.arenas = {}
        self.device_uuid = b""  # of the device whose memory it takes; empty: none
        self.device_memory = {}  # id -> (handle, memory)
        self.experts = {}  # (layer, expert) -> Expert
        self.contexts = {}
        self.calls = []  # (method, request), for the tests to look at
        self.lane = ""   # path; empty: there is none
        self.lane_calls = 0
        self.optimizer_step = 0
        self.ids = itertools.count(1)

    def Attach(self, request, context):
        self.model = request.model
        attached = wire.Attached(session=next(self.ids), rank=0, world_size=1, version="fake", lane=self.lane, device_uuid=self.device_uuid,
                                 owned_experts=range(request.model.num_experts))
        yield wire.SessionEvent(attached=attached)
        while context.is_active() and not self.ended.wait(0.05):
            pass
        yield wire.SessionEvent(ended=wire.Ended(reason="rank 1 was lost: killed by the test"))

    def Detach(self, request):
        return wire.DetachResponse()

    def CreateArena(self, request):
        arena, fd = next(self.ids), os.memfd_create("arena")
        os.ftruncate(fd, request.bytes)
        self.arenas[arena] = memoryview(mmap.mmap(fd, request.bytes))
        return wire.Arena(arena=arena, path=f"/proc/{os.getpid()}/fd/{fd}", bytes=request.bytes)

    def ShareEvents(self, request):
        return wire.ShareEventsResponse(handle=b"worker's event".ljust(64))

    def ImportDeviceMemory(self, request):
        if request.device_uuid != self.device_uuid:
            refuse("device_uuid: another device", grpc.StatusCode.FAILED_PRECONDITION)
        for number, (handle, _) in self.device_memory.items():
            if handle == request.handle:
                return wire.DeviceMemory(device_memory=number)
        fd = os.open(request.handle.rstrip().decode(), os.O_RDWR)  # what the fake CUDA's handles say
        number, memory = next(self.ids), memoryview(mmap.mmap(fd, request.bytes))
        os.close(fd)
        self.device_memory[number] = request.handle, memory
        return wire.DeviceMemory(device_memory=number)

    def ReleaseDeviceMemory(self, request):
        del self.device_memory[request.device_memory]
        return wire.ReleaseDeviceMemoryResponse()

    def tensor(self, name, descriptor, dtype, shape):
        if descriptor.device_memory and name not in ("x", "y", "dy", "dx"):
            refuse(f"{name}.device_memory: {descriptor.device_memory}, allowed is an arena")
        places = {**self.arenas, **{number: memory for number, (_, memory) in self.device_memory.items()}}
        place = descriptor.device_memory or descriptor.arena
        if place not in places and math.prod(shape):
            refuse(f"{name}.arena: {place} is not an arena of this session")
        if DTYPES.get(descriptor.dtype) != dtype or list(descriptor.shape) != list(shape):
            refuse(f"{name}: {DTYPES.get(descriptor.dtype)} {list(descriptor.shape)} is not {dtype} {list(shape)}")
        count = math.prod(shape)
        if count == 0:
            return torch.empty(list(shape), dtype=dtype)
        view = places[place]
        if descriptor.offset_bytes % 64 or descriptor.offset_bytes + count * 2 > len(view):
            refuse(f"{name}.offset_bytes: {descriptor.offset_bytes} is outside its arena")
        flat = torch.frombuffer(view, dtype=dtype, count=count, offset=descriptor.offset_bytes)
        return flat.view(list(shape))

    def compute_dtype(self):
        return DTYPES[self.model.dtype]

    def expert_tensors(self, request, dtype):
        m = self.model
        return (self.tensor("gate_up", request.gate_up, dtype, (2 * m.intermediate_size, m.hidden_size)),
                self.tensor("down", request.down, dtype, (m.hidden_size, m.intermediate_size)))

    def LoadExpert(self, request):
        self.experts[request.layer, request.expert] = Expert(
            *self.expert_tensors(request, DTYPES[request.gate_up.dtype]))
        return wire.LoadExpertResponse()

    def FinishLoad(self, request):
        for expert in range(self.model.num_experts):
            if (request.layer, expert) not in self.experts:
                refuse(f"layer {request.layer}: expert {expert} was not loaded", grpc.StatusCode.FAILED_PRECONDITION)
        return wire.FinishLoadResponse(parameter_version=1)

    def ExportExpert(self, request):
        expert = self.experts[request.layer, request.expert]
        source = expert.master if request.content == wire.EXPERT_CONTENT_WEIGHTS else expert.gradient
        for target, value in zip(self.expert_tensors(request, torch.float32), source):
            target.copy_(value)
        return wire.ExportExpertResponse()

    def Forward(self, request):
        m, dtype = self.model, self.compute_dtype()
        if not request.HasField("x"):
            refuse("x: missing")
        num_tokens = request.x.shape[0] if request.x.shape else 0
        x = self.tensor("x", request.x, dtype, (num_tokens, m.hidden_size))
        idx = self.tensor("expert_idx", request.expert_idx, torch.int32, (num_tokens, m.top_k))
        alpha = self.tensor("alpha", request.alpha, torch.float32, (num_tokens, m.top_k))
        y = self.tensor("y", request.y, dtype, (num_tokens, m.hidden_size))
        if num_tokens and not (0 <= int(idx.min()) and int(idx.max()) < m.num_experts):
            refuse(f"expert_idx: {idx[(idx < 0) | (idx >= m.num_experts)][0]} is not within 0..{m.num_experts - 1}")
        inputs = x.float().clone().requires_grad_(), alpha.clone().requires_grad_()
        weights = {e: [w.to(dtype).float().requires_grad_() for w in self.experts[request.invocation.layer, e].master]
                   for e in idx.unique().tolist()}
        pairs = {}
        result = torch.zeros(num_tokens, m.hidden_size)
        with torch.enable_grad():
            for e, (gate_up, down) in weights.items():
                token, slot = torch.nonzero(idx == e, as_tuple=True)
                gate, up = (inputs[0][token] @ gate_up.t()).chunk(2, dim=-1)
                phi = torch.nn.functional.silu(gate) * up
                out = phi @ down.t()
                pairs[e] = token, slot, phi.detach().pow(2).sum(-1), out
                result = result.index_add(0, token, (out * inputs[1][token, slot, None]).detach())
        y.copy_(result)
        if not request.evaluation:
            self.contexts[self.key(request.invocation)] = inputs, weights, pairs
        return wire.ForwardResponse(summary=self.summary(request.invocation, num_tokens * m.top_k))

    def Backward(self, request):
        m, dtype = self.model, self.compute_dtype()
        saved = self.contexts.pop(self.key(request.invocation), None)
        if saved is None:
            refuse(f"no open forward of {self.key(request.invocation)}", grpc.StatusCode.NOT_FOUND)
        (x, alpha), weights, pairs = saved
        dy = self.tensor("dy", request.dy, dtype, x.shape).float()
        kept = torch.zeros(alpha.shape, dtype=torch.uint8)
        dx, dalpha = torch.zeros_like(x), torch.zeros_like(alpha)
        for e, (token, slot, phi_norm, out) in pairs.items():
            delta = alpha[token, slot, None].detach() * dy[token]
            score = delta.pow(2).sum(-1) * phi_norm
            keep = torch.topk(score, math.ceil(self.retention_rate * len(token))).indices
            kept[token[keep], slot[keep]] = 1
            dalpha[token, slot] = (out.detach() * dy[token]).sum(-1)
            mask = kept[token, slot, None].float()
            gradients = torch.autograd.grad(out, [x, *weights[e]], delta * mask)
            dx += gradients[0]
            for total, part in zip(self.experts[request.invocation.layer, e].gradient, gradients[1:]):
                total += part
        self.tensor("dx", request.dx, dtype, x.shape).copy_(dx)
        self.tensor("dalpha", request.dalpha, torch.float32, alpha.shape).copy_(dalpha)
        self.tensor("kept", request.kept, torch.uint8, alpha.shape).copy_(kept)
        return wire.BackwardResponse(summary=self.summary(request.invocation, kept.numel(), int(kept.sum())))

    def summary(self, invocation, routed, kept=0):
        report = wire.InvocationReport(invocation=invocation, routed_rows=routed, kept_rows=kept)
        return wire.InvocationSummary(
            retention_rate=self.retention_rate, planned_routed_rows=routed, report=report, policy="fake",
            planned_kept_rows=round(self.retention_rate * routed), imbalance=wire.Imbalance(before=1, forward=1, backward=1))

    def Discard(self, request):
        if self.contexts.pop(self.key(request.invocation), None) is None:
            refuse(f"no open forward of {self.key(request.invocation)}", grpc.StatusCode.NOT_FOUND)
        return wire.DiscardResponse()

    def OptimizerStep(self, request):
        for expert in self.experts.values():
            expert.update(request)
        self.optimizer_step = request.step
        return wire.OptimizerStepResponse()

    def GradientNorm(self, request):
        squared = sum(float(g.double().pow(2).sum()) for expert in self.experts.values() for g in expert.gradient)
        return wire.GradientNormResponse(squared_norm=squared)

    def ZeroGradients(self, request):
        for expert in self.experts.values():
            for gradient in expert.gradient:
                gradient.zero_()
        return wire.ZeroGradientsResponse()

    def SaveCheckpoint(self, request):
        os.makedirs(request.directory, exist_ok=True)
        state = {key: (e.master, e.moments) for key, e in self.experts.items()}
        torch.save((state, self.optimizer_step), os.path.join(request.directory, f"step-{request.step}"))
        return wire.SaveCheckpointResponse()

    def LoadCheckpoint(self, request):
        steps = sorted(int(name[5:]) for name in os.listdir(request.directory)) if os.path.isdir(request.directory) else []
        step = request.step if request.step >= 0 else (steps or [-1])[-1]
        if step not in steps:
            refuse(f"{request.directory}: no checkpoint of step {step}", grpc.StatusCode.NOT_FOUND)
        state, self.optimizer_step = torch.load(os.path.join(request.directory, f"step-{step}"))
        for key, (master, moments) in state.items():
            self.experts[key] = Expert(*master)
            self.experts[key].moments = moments
        return wire.LoadCheckpointResponse(step=step, optimizer_step=self.optimizer_step)

    @staticmethod
    def key(invocation):
        return invocation.step, invocation.layer, invocation.micro_batch


def run(worker, name, request):
    with worker.lock, torch.no_grad():
        worker.calls.append((name, request))
        return getattr(worker, name)(request)


class FakeLane:
    """Forward and Backward over whole messages, as a worker's lane."""

    def __init__(self, worker, path):
        self.worker, self.connections = worker, []
        self.listening = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        self.listening.bind(path)
        self.listening.listen()
        worker.lane = path
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        try:
            while True:
                connection, _ = self.listening.accept()
                self.connections.append(connection)
                threading.Thread(target=self.answer, args=[connection], daemon=True).start()
        except OSError:
            pass  # closed

    def answer(self, connection):
        try:
            while True:
                message = connection.recv(1 << 16)
                if not message:
                    return
                call = wire.LaneCall.FromString(message)
                self.worker.lane_calls += 1
                field, reply = call.WhichOneof("call"), wire.LaneReply(number=call.number)
                try:
                    getattr(reply, field).CopyFrom(run(self.worker, field.capitalize(), getattr(call, field)))
                except Refused as refused:
                    reply.code, reply.message = refused.code.value[0], refused.message
                connection.send(reply.SerializeToString())
        except OSError:
            pass  # either side has closed

    def close(self):
        for end in [self.listening, *self.connections]:
            try:
                end.shutdown(sockets.SHUT_RDWR)
            except OSError:
                pass  # its peer was faster
            end.close()


def serve(worker, socket):
    """Starts a gRPC server for the handlers on a Unix socket and returns it."""
    def unary(name):
        def handle(request, context):
            try:
                return run(worker, name, request)
            except Refused as refused:
                context.abort(refused.code, refused.message)
        return handle

    handlers = {}
    for name, method in wire.METHODS.items():
        if not hasattr(worker, name):
            continue
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handle = worker.Attach if method.server_streaming else unary(name)
        handlers[name] = make(handle, method.request.FromString, method.response.SerializeToString)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("lrmoe.v1.Worker", handlers)])
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    return server


if __name__ == "__main__":
    torch.set_num_threads(1)
    served = FakeWorker(float(sys.argv[2]) if len(sys.argv) > 2 else 1.0)
    lane = FakeLane(served, sys.argv[1] + ".lane")
    serve(served, sys.argv[1]).wait_for_termination()
