# shellcheck shell=bash
# The environment of a training process, each variable with its reason. Sourced by the launchers, with RANKS_PER_NODE set; source
# it before your own torchrun or in a job script too. What you have set yourself is never overwritten.

# set_default NAME VALUE
set_default() { [[ -n ${!1+set} ]] || export "$1=$2"; }

# --- any machine

# Threads of CPU operations. Ranks that each take all cores trip over each other: with as few as two threads beside another busy
# process a 0.4 s step was seen to take 2 to 8 s. torchrun's own default is 1 even for a single rank on a machine full of cores.
set_default OMP_NUM_THREADS $(($(nproc) > ${RANKS_PER_NODE:-1} ? $(nproc) / ${RANKS_PER_NODE:-1} : 1))

# With MAX_RESTARTS > 0: restarted ranks would read the addresses of the dead ones from a store that outlives them, and fail or
# hang (pytorch issue 135712). Costs nothing: the ranks get a store of their own.
set_default TORCH_DISABLE_SHARE_RDZV_TCP_STORE 1

# Lines arrive in a log file when they are written, and none is lost when a process is killed.
set_default PYTHONUNBUFFERED 1

# A segmentation fault, or NCCL's watchdog ending the process, leaves the Python stack of every thread in the log.
set_default PYTHONFAULTHANDLER 1

if [[ -e /dev/nvidiactl || -e /dev/kfd ]]; then
  # --- GPUs

  # Memory segments that grow in place: far less lost to fragmentation when sizes vary (gathered FSDP weights, evaluation).
  # PYTORCH_CUDA_ALLOC_CONF is the older name and wins where both are set, so if you use it we keep out of its way.
  [[ -n ${PYTORCH_CUDA_ALLOC_CONF+set} ]] || set_default PYTORCH_ALLOC_CONF expandable_segments:True

  # A collective that times out leaves a record of the last ones of each rank: it says who did not come.
  set_default TORCH_NCCL_DUMP_ON_TIMEOUT 1

  # Left at torch's defaults, which are right since 2.11: TORCH_NCCL_ASYNC_ERROR_HANDLING (3: a failed collective ends the process
  # instead of hanging), TORCH_FR_BUFFER_SIZE (2000 collectives kept for the record above). NCCL_DEBUG=INFO tells which network is used.
else
  # --- CPU

  # Keep freed memory instead of returning it to the kernel and faulting it in again each step (18 % of the step at 12 layers, d 768).
  # Costs: the process stays at its peak size between steps, and the peak was 1 to 3 % higher (6 layers, d 384), as all blocks lie in
  # one heap. glibc before 2.36 is left alone: older ones refuse a threshold this large, and the other two settings alone would turn
  # off their own adaptation.
  if [[ $(getconf GNU_LIBC_VERSION 2>/dev/null || true) =~ ^glibc\ 2\.([0-9]+) ]] && ((BASH_REMATCH[1] >= 36)); then
    set_default MALLOC_MMAP_THRESHOLD_ 4294967296
    set_default MALLOC_TRIM_THRESHOLD_ 8589934592
    set_default MALLOC_TOP_PAD_ 268435456
  fi
fi

# --- several nodes: set these yourself, nobody else can know

# NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME: the network interface that reaches the other nodes (`ip -br addr`), if ranks wait for each
# other at the start or name an address like 127.0.1.1. gloo takes the interface that the node's own host name resolves to, which on
# many systems is the loopback. Both are needed: checkpoints are coordinated over gloo also where the GPUs talk over NCCL.

# --- not here: CUBLAS_WORKSPACE_CONFIG is set by the trainer where run.deterministic asks for it; TMPDIR is yours.
