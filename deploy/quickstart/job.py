"""A running job: the controller, and mpirun with workers and training processes. Ends everything it started."""

import ctypes
import os
import signal
import subprocess
import sys
import time

START_TIMEOUT_S = 30
STOP_TIMEOUT_S = 10
TAIL_LINES = 40

# Open MPI in a container: as root, more ranks than cores, and waiting ranks give the core away.
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",  # needs a privilege that containers lack
}
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class JobFailed(RuntimeError):
    pass


def _end_with_parent():
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _start(command, **options):
    # A session of its own: a Ctrl-C reaches this program only, which then ends its children in order.
    return subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_parent, **options)


def _stop(process):
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Job:
    """with Job(...) as job: job.run(); then job.lrmoectl(...) while the controller still remembers the plans.

    bin_dir: the programs. folder: logs go here. controller_flags, worker_flags: lists. ranks: workers."""

    def __init__(self, bin_dir, folder, ranks, controller_flags, worker_flags, environment):
        self.bin_dir, self.folder, self.ranks = bin_dir, folder, ranks
        self.controller_flags, self.worker_flags = controller_flags, worker_flags
        self.environment = {**os.environ, **MPI_ENVIRONMENT, **environment}
        self.address = None
        self._controller = self._mpirun = self._controller_log = None

    def __enter__(self):
        os.makedirs(self.folder, exist_ok=True)
        port_file = os.path.join(self.folder, "controller.address")
        if os.path.exists(port_file):
            os.remove(port_file)
        log_path = os.path.join(self.folder, "controller.log")
        self._controller_log = open(log_path, "w")
        self._controller = _start(
            [os.path.join(self.bin_dir, "lrmoe-controller"), "--listen", "127.0.0.1:0", "--port-file", port_file,
             "--ranks", str(self.ranks), *self.controller_flags],
            stdout=self._controller_log, stderr=subprocess.STDOUT, env=self.environment)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (os.path.exists(port_file) and os.path.getsize(port_file)):
            if self._controller.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                with open(log_path) as log:
                    raise JobFailed("the controller did not start:\n" + "".join(log.readlines()[-TAIL_LINES:]))
            time.sleep(0.02)
        with open(port_file) as file:
            self.address = file.read().strip()
        return self

    def __exit__(self, *exception):
        _stop(self._mpirun)
        _stop(self._controller)
        self._controller_log.close()

    @property
    def controller_pid(self):
        return self._controller.pid

    def run(self, command, show=lambda line: True):
        """Runs `command` as every rank's training process to its end. Lines for which show(line) holds are printed,
        all are logged. Raises JobFailed with the end of the log unless every rank exits with 0."""
        mpirun = ["mpirun", "-n", str(self.ranks), os.path.join(self.bin_dir, "lrmoe-worker"), "--controller",
                  self.address, *self.worker_flags, "--", *command]
        lines = []
        with open(os.path.join(self.folder, "job.log"), "w") as log:
            self._mpirun = _start(mpirun, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.environment,
                                  text=True, errors="replace")
            for line in self._mpirun.stdout:
                log.write(line)
                log.flush()
                lines.append(line)
                if show(line):
                    sys.stdout.write(line)
                    sys.stdout.flush()
        status = self._mpirun.wait()
        if status != 0:
            raise JobFailed(f"the job ended with status {status}:\n" + "".join(lines[-TAIL_LINES:]))

    def lrmoectl(self, *arguments):
        """What lrmoectl prints. Raises JobFailed when it fails."""
        done = subprocess.run([os.path.join(self.bin_dir, "lrmoectl"), "--controller", self.address, *arguments],
                              capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise JobFailed(f"lrmoectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout
