"""lrmoe-bench compare-pytorch: one MoE layer, forward and backward, in this process and on the same tensors:

  loop        a PyTorch loop over the experts, one weight tensor for each
  eager       Hugging Face's Qwen3-MoE experts, stacked weights (where transformers has them)
  grouped_mm  the same by torch's grouped GEMM
  lrmoe       MoELayer, through a worker of one rank with a controller

The arms take turns. Besides wall time, processor time is shown, of this process and of the worker's computing threads:
on a busy machine compare that. Results are checked against the loop's."""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

START_TIMEOUT_S = 30
ARMS = ("loop", "eager", "grouped_mm", "lrmoe")
# Above this many experts the eager arm, whose backward writes a full-size zero tensor for each, has to be asked for.
MOST_EAGER_EXPERTS = 32


def parse_arguments():
    parser = argparse.ArgumentParser(prog="lrmoe-bench compare-pytorch", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5, help="measured passes of each arm, after one that is not")
    parser.add_argument("--arms", help=f"comma-separated, of {', '.join(ARMS)}; default: all that are possible, eager up to "
                        f"{MOST_EAGER_EXPERTS} experts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    for name in ("experts", "top_k", "hidden", "intermediate", "tokens", "threads", "repetitions"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; allowed: 1 and more")
    if options.top_k > options.experts:
        parser.error(f"--top-k is {options.top_k}; allowed: 1..{options.experts}, the experts")
    for arm in (options.arms or "").split(",") if options.arms else ():
        if arm not in ARMS:
            parser.error(f"--arms names {arm}; allowed: {', '.join(ARMS)}")
    return options


# ---- outside: a controller, and this program again as the worker's training process


def run_with_worker(options):
    with tempfile.TemporaryDirectory(prefix="lrmoe-compare-") as folder:
        port_file = os.path.join(folder, "controller.address")
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "LRMOE_COMPARE_INSIDE": "1"}
        controller = subprocess.Popen([os.path.join(options.bin, "lrmoe-controller"), "--listen", "127.0.0.1:0",
                                       "--port-file", port_file, "--ranks", "1", "--planner", "fixed", "--rates", "1.0",
                                       "--log-level", "error"], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not (os.path.exists(port_file) and os.path.getsize(port_file)):
                if controller.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("lrmoe-bench compare-pytorch: the controller did not start")
                time.sleep(0.01)
            with open(port_file) as file:
                address = file.read().strip()
            worker = [os.path.join(options.bin, "lrmoe-worker"), "--controller", address, "--transport", "inproc",
                      "--threads", str(options.threads), "--log-level", "error", "--", sys.executable, *sys.argv]
            return subprocess.run(worker, env=environment).returncode
        finally:
            controller.terminate()
            controller.wait()


# ---- inside


def median(values):
    values = sorted(values)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def cpu_ms():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (usage.ru_utime + usage.ru_stime) * 1e3


class Problem:
    """The tensors every arm works on. Weights are stacked [E, 2F, H], [E, H, F]."""

    def __init__(self, torch, options):
        generator = torch.Generator().manual_seed(options.seed)
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
        e, k, h, f, t = options.experts, options.top_k, options.hidden, options.intermediate, options.tokens

        def random(*shape, scale=1.0):
            out = torch.empty(shape, dtype=self.dtype)
            for part in out.unbind(0):  # not a whole fp32 copy at once
                part.copy_(torch.randn(shape[1:], generator=generator) * scale)
            return out

        self.x, self.dy = random(t, h), random(t, h)
        self.ids = torch.stack([torch.randperm(e, generator=generator)[:k] for _ in range(t)])
        self.alpha = torch.softmax(torch.randn(t, k, generator=generator), dim=-1)
        self.gate_up, self.down = random(e, 2 * f, h, scale=h**-0.5), random(e, h, f, scale=f**-0.5)

    def inputs(self):
        return self.x.detach().requires_grad_(), self.alpha.detach().clone().requires_grad_()


class Loop:
    def __init__(self, torch, problem):
        self.torch, self.ids = torch, problem.ids
        self.weights = [(w1.detach().requires_grad_(), w2.detach().requires_grad_())
                        for w1, w2 in zip(problem.gate_up, problem.down)]

    def forward(self, x, alpha):
        functional = self.torch.nn.functional
        y = self.torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(self.weights):
            token, slot = self.torch.where(self.ids == expert)
            if not token.numel():
                continue
            gate, up = functional.linear(x[token], gate_up).chunk(2, dim=-1)
            out = functional.linear(functional.silu(gate) * up, down) * alpha[token, slot].unsqueeze(-1).to(x.dtype)
            y = y.index_add(0, token, out)
        return y

    def extra_cpu_ms(self):
        return 0.0

    def clear(self):
        for pair in self.weights:
            for weight in pair:
                weight.grad = None


class HuggingFace:
    def __init__(self, torch, problem, options, implementation):
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # transformers 5
        config = Qwen3MoeConfig(num_experts=options.experts, num_experts_per_tok=options.top_k, hidden_size=options.hidden,
                                moe_intermediate_size=options.intermediate, hidden_act="silu")
        config._experts_implementation = implementation
        with torch.device("meta"):
            self.experts = Qwen3MoeExperts(config)
        self.experts.gate_up_proj = torch.nn.Parameter(problem.gate_up)
        self.experts.down_proj = torch.nn.Parameter(problem.down)
        self.ids = problem.ids

    def forward(self, x, alpha):
        return self.experts(x, self.ids, alpha.to(x.dtype))

    def extra_cpu_ms(self):
        return 0.0

    def clear(self):
        self.experts.zero_grad(set_to_none=True)


class Lrmoe:
    def __init__(self, problem, options):
        import lrmoe
        self.worker = lrmoe.connect(num_layers=1)
        self.layer = lrmoe.MoELayer(self.worker, 0, options.experts, options.top_k, options.hidden, options.intermediate,
                                    dtype=problem.dtype)
        self.layer.load_experts(problem.gate_up, problem.down)
        self.optimizer = lrmoe.AdamW(self.worker)
        self.ids = problem.ids

    def forward(self, x, alpha):
        return self.layer(x, self.ids, alpha)

    def extra_cpu_ms(self):
        plan = self.layer.last_plan
        return plan.forward_ms["cpu"] + plan.backward_ms["cpu"]

    def engine_ms(self):
        """What the engine itself took: the rest of a pass is the way there and back."""
        plan = self.layer.last_plan
        return {"forward": plan.forward_ms["total"], "backward": plan.backward_ms["total"], "plan": plan.forward_ms["plan"]}

    def clear(self):
        self.optimizer.zero_grad()


def measure_pass(arm, problem):
    """(y, dx, dalpha), {forward_ms, backward_ms, total_ms, cpu_ms}"""
    x, alpha = problem.inputs()
    cpu, start = cpu_ms(), time.perf_counter()
    y = arm.forward(x, alpha)
    middle = time.perf_counter()
    y.backward(problem.dy)
    end = time.perf_counter()
    times = {"forward_ms": (middle - start) * 1e3, "backward_ms": (end - middle) * 1e3, "total_ms": (end - start) * 1e3,
             "cpu_ms": cpu_ms() - cpu + arm.extra_cpu_ms()}
    if isinstance(arm, Lrmoe):
        engine = arm.engine_ms()
        times["plan_ms"] = engine["plan"]
        times["around_forward_ms"] = times["forward_ms"] - engine["forward"]
        times["around_backward_ms"] = times["backward_ms"] - engine["backward"]
    arm.clear()
    return (y.detach(), x.grad, alpha.grad), times


def wanted_arms(options):
    """(arms, {arm: why it is left out})"""
    if options.arms:
        return options.arms.split(","), {}
    left_out = {}
    try:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: F401
        if options.experts > MOST_EAGER_EXPERTS:
            left_out["eager"] = f"{options.experts} experts take minutes; ask for it with --arms"
    except ImportError as error:
        left_out.update(dict.fromkeys(("eager", "grouped_mm"), f"not in this Python: {error}"))
    return [arm for arm in ARMS if arm not in left_out], left_out


def largest_difference(torch, mine, theirs):
    """Over y, dx and d(alpha), relative to the largest element."""
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in zip(mine, theirs))


def compare(options):
    import torch
    torch.set_num_threads(options.threads)
    problem = Problem(torch, options)
    names, left_out = wanted_arms(options)
    make = {"loop": lambda: Loop(torch, problem), "lrmoe": lambda: Lrmoe(problem, options),
            "eager": lambda: HuggingFace(torch, problem, options, "eager"),
            "grouped_mm": lambda: HuggingFace(torch, problem, options, "grouped_mm")}
    arms = {name: make[name]() for name in names}
    samples = {name: [] for name in names}
    results = {}
    for repetition in range(options.repetitions + 1):
        for name, arm in arms.items():
            results[name], times = measure_pass(arm, problem)
            if repetition > 0:
                samples[name].append(times)
    out = {"shape": {name: getattr(options, name) for name in
                     ("experts", "top_k", "hidden", "intermediate", "tokens", "dtype", "threads")},
           "torch": torch.__version__, "load_average": os.getloadavg()[0], "seed": options.seed, "arms": {},
           "left_out": left_out}
    first = names[0]
    for name in names:
        fields = {field: {"median": median([s[field] for s in samples[name]]), "min": min(s[field] for s in samples[name]),
                          "max": max(s[field] for s in samples[name])} for field in samples[name][0]}
        out["arms"][name] = {**fields, f"difference_from_{first}": largest_difference(torch, results[name], results[first])}
    if "lrmoe" in arms:
        ours = out["arms"]["lrmoe"]
        out["times_as_fast"] = {name: {field: arm[field]["median"] / ours[field]["median"]
                                       for field in ("total_ms", "cpu_ms")}
                                for name, arm in out["arms"].items() if name != "lrmoe"}
    return out


def print_table(out):
    shape = out["shape"]
    print("  ".join(f"{name} {value}" for name, value in shape.items()))
    print(f"torch {out['torch']}, load {out['load_average']:.1f}; ms, median of the passes (least)")
    print(f"{'':12}{'forward':>20}{'backward':>20}{'both':>20}{'processor':>20}{'difference':>12}")
    for name, arm in out["arms"].items():
        cells = "".join(f"{arm[field]['median']:>11.1f} ({arm[field]['min']:>6.1f})" for field in
                        ("forward_ms", "backward_ms", "total_ms", "cpu_ms"))
        difference = next(value for field, value in arm.items() if field.startswith("difference"))
        print(f"{name:12}{cells}{difference:>12.1e}")
    if "lrmoe" in out["arms"]:
        arm = out["arms"]["lrmoe"]
        print("lrmoe, us, median (least): around the engine's forward {:.0f} ({:.0f}), backward {:.0f} ({:.0f}); plan {:.0f} "
              "({:.0f})".format(*(1e3 * arm[field][which] for field in ("around_forward_ms", "around_backward_ms", "plan_ms")
                                  for which in ("median", "min"))))
    for name, ratio in out.get("times_as_fast", {}).items():
        print(f"lrmoe is {ratio['total_ms']:.2f} times as fast as {name}, {ratio['cpu_ms']:.2f} in processor time")
    for name, reason in out["left_out"].items():
        print(f"left out: {name}: {reason}")


def main():
    options = parse_arguments()
    if "LRMOE_COMPARE_INSIDE" not in os.environ:
        return run_with_worker(options)
    out = compare(options)
    print(json.dumps(out, indent=2)) if options.output == "json" else print_table(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
