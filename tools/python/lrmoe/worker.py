"""A session with the local worker."""

import atexit
import os
import weakref

from . import protocol
from .arena import ArenaPool
from .connection import Connection
from .device import RowPlaces
from .errors import Error

_REFUSED_BEFORE_PLANNING = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE")
_MODEL_FIELDS = ("num_experts", "top_k", "hidden_size", "intermediate_size", "gated", "activation", "dtype")


def connect(socket=None, *, num_layers=None, connect_timeout=60.0, call_timeout=600.0, client="lrmoe-python"):
    """Opens a session with the local worker.

    socket: path of the worker's Unix socket; by default the environment's LRMOE_SOCKET, which `lrmoe-worker -- command`
      sets.
    num_layers: MoE layers of the model, 1..1024. When left out, it is the highest MoELayer index plus one at the first
      use of a layer, and weights given to load_experts before that are kept in a copy until then.
    connect_timeout, call_timeout: seconds. The second bounds every call; the worker has shorter limits of its own, so
      it only matters when the worker hangs.
    client: a name for the worker's log.

    Raises ValueError without a socket, WorkerLost when no worker answers in time.
    """
    socket = socket or os.environ.get("LRMOE_SOCKET")
    if not socket:
        raise ValueError("no socket: pass its path or start this program with `lrmoe-worker ... -- command`, which sets "
                         "LRMOE_SOCKET")
    if num_layers is not None and not 1 <= num_layers <= 1024:
        raise ValueError(f"num_layers: {num_layers} is not within 1..1024")
    return Worker(Connection(socket, connect_timeout, call_timeout), num_layers, client)


class Worker:
    """The session. Make one per process, with connect(). Not for use by several threads at once, because collective
    calls need one order on all ranks; autograd's own threads are fine.

    Every method marked collective must be called by all ranks in the same order. When one rank's call is refused, all
    ranks raise lrmoe.Error with a message that names the rank, and the worker goes on serving.
    """

    def __init__(self, connection, num_layers, client):
        self._connection = connection
        self._client = client
        self._num_layers = num_layers
        self._layers = {}
        self._pending_loads = []
        self._attached = None
        self._pool = None
        self._row_places = None
        self._step = 0
        self._optimizer_updates = 0
        self._micro_batches = {}
        self._parameter_changes = 0  # times the experts' weights were changed
        # atexit must not keep the session alive.
        reference = weakref.ref(self)
        self._at_exit = lambda: reference() is not None and reference().close()
        atexit.register(self._at_exit)

    # Facts of the session. The first one asked for attaches.

    @property
    def rank(self):
        """This worker's rank, 0..world_size-1."""
        return self._attach().rank

    @property
    def world_size(self):
        """Workers of the job."""
        return self._attach().world_size

    @property
    def version(self):
        """Version of the worker program, as it said when the session began. Protocols that do not fit are refused then."""
        return self._attach().version

    @property
    def has_lane(self):
        """Whether forward and backward passes go through the worker's lane, a socket without gRPC. LRMOE_LANE=0 in the
        environment of lrmoe.connect keeps them on gRPC."""
        self._attach()
        return self._connection.has_lane

    @property
    def owned_experts(self):
        """Expert indices this rank owns, ascending; the same in every layer."""
        return list(self._attach().owned_experts)

    @property
    def step(self):
        """Optimizer steps so far: the step number of the next invocation, as lrmoectl shows it."""
        return self._step

    # Checkpoints.

    def save_checkpoint(self, directory, step=None):
        """Collective. Writes masters, moments and weights of all experts to directory/step-N, whole or not at all. The
        directory must be shared by all ranks. step: by default the number of optimizer steps so far. Gradients and
        unfinished invocations are not part of it. Returns the step."""
        step = self._step if step is None else int(step)
        self._call("SaveCheckpoint", directory=os.path.abspath(directory), step=step)
        return step

    def load_checkpoint(self, directory, step=None):
        """Collective. Loads directory/step-N, by default the newest. Open invocations are dropped and expert gradients
        are zero afterwards. A truncated, altered or mismatched checkpoint is refused whole with an Error that names the
        file; nothing has changed then. Returns the step it was saved with."""
        response = self._call("LoadCheckpoint", directory=os.path.abspath(directory), step=-1 if step is None else step)
        self._optimizer_updates = response.optimizer_step
        self._parameter_changes += 1
        # An invocation's number is never used twice in a session, so going back in training does not go back here.
        used = self._step + 1 if self._micro_batches else self._step
        self._step = max(used, response.optimizer_step)
        self._micro_batches.clear()
        return response.step

    # Memory.

    def empty(self, shape, dtype):
        """An uninitialised tensor in the worker's shared memory. Passing it to a layer as x saves the copy into shared
        memory. dtype: the layer's."""
        return self._tensors().empty(shape, dtype)

    def close(self):
        """Ends the session; the worker frees what belongs to it. Tensors that layers returned stay valid. Called at
        exit."""
        atexit.unregister(self._at_exit)
        if self._attached is not None:
            try:
                self._connection.call("Detach", protocol.DetachRequest(session=self._attached.session))
            except Error:
                pass  # already gone
        self._connection.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    # For the layers and the optimizer.

    def _register(self, layer):
        if layer.layer in self._layers:
            raise Error("ALREADY_EXISTS", f"layer: {layer.layer} exists already")
        if self._num_layers is not None and layer.layer >= self._num_layers:
            raise Error("OUT_OF_RANGE", f"layer: {layer.layer} is not below num_layers {self._num_layers}; make every "
                        "layer before the first is used, or pass num_layers to lrmoe.connect")
        for other in list(self._layers.values())[:1]:
            for field in _MODEL_FIELDS:
                mine, theirs = getattr(layer, field), getattr(other, field)
                if mine != theirs:
                    raise Error("INVALID_ARGUMENT", f"{field}: {mine} in layer {layer.layer} but {theirs} in layer "
                                f"{other.layer}; all layers of a worker have one shape")
        self._layers[layer.layer] = layer

    def _unregister(self, layer):
        if self._layers.get(layer.layer) is layer:
            del self._layers[layer.layer]

    def _load_or_defer(self, layer, gate_up, down):
        if self._attached is None and self._num_layers is None:
            self._pending_loads.append((layer, gate_up.detach().clone(), down.detach().clone()))
        else:
            self._attach()
            layer._load_stacked(gate_up, down)

    def _attach(self):
        if self._attached is not None:
            return self._attached
        if not self._layers:
            raise Error("FAILED_PRECONDITION", "the session has no layer yet: make the MoELayers first")
        if self._num_layers is None:
            self._num_layers = max(self._layers) + 1
        model = next(iter(self._layers.values()))._model_spec(self._num_layers)
        self._attached = self._connection.attach(protocol.AttachRequest(
            protocol_version=protocol.VERSION, client=self._client, model=model,
            expected_world_size=int(os.environ.get("WORLD_SIZE", 0))))
        self._pool = ArenaPool(self._connection, self._attached.session)
        self._row_places = RowPlaces(self._connection, self._attached, self._pool)
        loads, self._pending_loads = self._pending_loads, []
        for layer, gate_up, down in sorted(loads, key=lambda load: load[0].layer):
            layer._load_stacked(gate_up, down)
        return self._attached

    def _tensors(self):
        self._attach()
        return self._pool

    def _call(self, name, **fields):
        session = self._attach().session
        return self._connection.call(name, protocol.METHODS[name].request(session=session, **fields))

    def _place_rows(self, rows, dtype, out_shape):
        """(pool, rows, out): as RowPlaces.place."""
        self._attach()
        return self._row_places.place(rows, dtype, out_shape)

    def _call_with(self, pool, rows, out, name, **fields):
        """_call with rows and out of _place_rows."""
        pool.before_call()
        try:
            response = self._call(name, **fields)
        except Error as error:
            pool.after_error(error, rows, out)
            raise
        pool.after_call()
        return response

    def _next_invocation(self, layer):
        micro_batch = self._micro_batches.get(layer, 0)
        self._micro_batches[layer] = micro_batch + 1
        return protocol.Invocation(step=self._step, layer=layer, micro_batch=micro_batch)

    def _return_invocation(self, invocation, error):
        """After a refused Forward: when it was refused before anything was planned, the number is as good as new. Ranks
        that disagreed about the layer so agree about the numbers afterwards."""
        if error.code in _REFUSED_BEFORE_PLANNING:
            self._micro_batches[invocation.layer] = invocation.micro_batch

    def _optimizer_step(self, **hyperparameters):
        self._call("OptimizerStep", step=self._optimizer_updates + 1, **hyperparameters)
        self._optimizer_updates += 1
        self._parameter_changes += 1
        self._step += 1
        self._micro_batches.clear()
