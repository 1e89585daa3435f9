#!/usr/bin/env bash
# A real Slurm cluster of many nodes on one machine, for the tests of the `slurm` pool.
#
#   cluster.sh up [N]      start munged, slurmctld and N slurmd (8 unless said)
#   cluster.sh down        cancel all jobs and stop what `up` started, nothing else
#   cluster.sh status      daemons, nodes and jobs; exit status 0 if every node is usable
#   cluster.sh env         the line a shell needs to use the cluster
#   cluster.sh install     only install what is missing
#
# Each node n01 … is a slurmd of its own with a port of its own; there are no cgroups, and no systemd is needed. All
# files are below LAB_DIR. Partition `main` preempts partition `scavenger`. Needs root.
#
# With LAB_NAMESPACES=1 every node is a host of its own, with a name, an address (10.77.0.11 …) and a loopback of its own.
# slurmctld is on the host `head` (10.77.0.1), which has another address, 10.78.0.1, that no node can reach. Nothing of it
# is in the network of this machine: `LAB_DIR/at HOST COMMAND …` runs a command on a host.
#
# Settings, from the environment:
#
#   LAB_DIR        folder of everything (at most 70 characters: sockets)     LAB_GRACE      GraceTime of scavenger
#   LAB_PORT       port of slurmctld; node i has LAB_PORT + i                LAB_PREEMPT    CANCEL or REQUEUE
#   LAB_CPUS       CPUs that a node claims to have                           LAB_KILLWAIT   from SIGTERM to SIGKILL
#   LAB_MEMORY     MB that a node claims to have                             LAB_TIMEOUT    MessageTimeout
#   LAB_SCHEDULER  SchedulerParameters                                       LAB_PROCTRACK  ProctrackType
#   LAB_PARAMETERS SlurmctldParameters                                       LAB_ACCOUNTING 1: slurmdbd with MariaDB
#   LAB_TOPOLOGY   lines of topology.conf: a tree of switches                LAB_NAMESPACES 1: a network per node
#   LAB_MAIN, LAB_SCAVENGER  the lines of the partitions after their names   LAB_EXTRA      more lines of slurm.conf
#   LAB_GRES       Gres of each node in order, - for none: "gpu:4 gpu:a100:2,gpu:v100:1 -"
#
# GPUs of LAB_GRES are links to /dev/null, LAB_DIR/devices/NODE/gpu0 and so on. Slurm hands them out and sets
# SLURM_GPUS_ON_NODE, SLURM_JOB_GPUS, CUDA_VISIBLE_DEVICES and its like as for real ones. (With plain files as devices it
# sets SLURM_GPUS_ON_NODE only; without any, nodes are INVAL. Seen in 22.05.)
set -euo pipefail

LAB_DIR=${LAB_DIR:-${TMPDIR:-/tmp}/bftrainer-lab}
LAB_PORT=${LAB_PORT:-17000}
LAB_CPUS=${LAB_CPUS:-1}
LAB_MEMORY=${LAB_MEMORY:-1000}
LAB_GRACE=${LAB_GRACE:-5}
LAB_PREEMPT=${LAB_PREEMPT:-CANCEL}
LAB_KILLWAIT=${LAB_KILLWAIT:-5}
LAB_TIMEOUT=${LAB_TIMEOUT:-5}
# A stock Slurm plans every 30 s and schedules every 60 s; tests do not want to wait for that.
LAB_SCHEDULER=${LAB_SCHEDULER:-bf_interval=1,sched_interval=1,batch_sched_delay=0}
# Without it the first signal of a preemption with a grace time reaches job steps only, never the batch script.
LAB_PARAMETERS=${LAB_PARAMETERS-preempt_send_user_signal}
LAB_PROCTRACK=${LAB_PROCTRACK:-proctrack/linuxproc}
LAB_ACCOUNTING=${LAB_ACCOUNTING:-0}
LAB_MAIN=${LAB_MAIN:-PriorityTier=10 PreemptMode=OFF}
LAB_SCAVENGER=${LAB_SCAVENGER:-PriorityTier=1 PreemptMode=$LAB_PREEMPT GraceTime=$LAB_GRACE}
LAB_EXTRA=${LAB_EXTRA:-}
LAB_TOPOLOGY=${LAB_TOPOLOGY:-}
LAB_NAMESPACES=${LAB_NAMESPACES:-0}
LAB_GRES=${LAB_GRES:-}

conf=$LAB_DIR/slurm.conf
run=$LAB_DIR/run
log=$LAB_DIR/log
export SLURM_CONF=$conf
export PATH=$PATH:/usr/sbin:/sbin

fail() { echo "cluster.sh: $*" >&2; exit 1; }

# Whether process $1 runs program $2: a process id that was given to somebody else is not ours.
runs() {
  local program
  program=$(readlink "/proc/$1/exe" 2>/dev/null) || return 1
  program=${program##*/}
  [[ ${program% (deleted)} == "$2"* ]]
}

# The id in pid file $1, if that process runs program $2.
pid_of() {
  local pid
  { read -r pid <"$1"; } 2>/dev/null || return 1
  [[ $pid =~ ^[0-9]+$ ]] && runs "$pid" "$2" && echo "$pid"
}

# End program $2 of pid file $1: SIGTERM, and SIGKILL after 15 s. A stopped one is woken so that it can end.
end() {
  local pid i
  if pid=$(pid_of "$1" "$2"); then
    kill -TERM "$pid" 2>/dev/null || true
    kill -CONT "$pid" 2>/dev/null || true
    for ((i = 0; i < 150; i++)); do runs "$pid" "$2" || break; sleep 0.1; done
    if runs "$pid" "$2"; then kill -KILL "$pid" 2>/dev/null || true; fi
  fi
  rm -f "$1"
}

# Several clusters may be wanted at once, on a machine that has no Slurm yet: the first one installs it.
install_missing() {
  local turn
  exec {turn}>"${TMPDIR:-/tmp}/bft-lab-install.lock"
  flock "$turn"
  install_in_turn
  exec {turn}>&-
}

install_in_turn() {
  local missing=() pair refused=0 done=0
  for pair in munged:munge slurmctld:slurm-wlm slurmd:slurm-wlm sbatch:slurm-wlm; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
  done
  if [[ $LAB_ACCOUNTING == 1 ]]; then
    for pair in slurmdbd:slurmdbd mariadbd:mariadb-server; do
      command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}" slurm-wlm-mysql-plugin)
    done
  fi
  if [[ $LAB_NAMESPACES == 1 ]]; then
    for pair in ip:iproute2 openssl:openssl; do # a controller that other hosts reach makes certificates
      command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
    done
  fi
  ((${#missing[@]} == 0)) && return 0
  command -v apt-get >/dev/null || fail "${missing[*]} must be installed, and there is no apt-get to do it"
  # The packages would start daemons of their own.
  if [[ ! -e /usr/sbin/policy-rc.d ]]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
    refused=1
  fi
  local get=(env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=300 --no-install-recommends install "${missing[@]}")
  { "${get[@]}" || { apt-get update && "${get[@]}"; }; } </dev/null >"$log/apt.log" 2>&1 && done=1
  ((refused)) && rm -f /usr/sbin/policy-rc.d
  ((done)) || fail "apt-get cannot install ${missing[*]}, see $log/apt.log"
}

# Run a command on host $1: in its namespaces, or just here if there are none.
at() {
  if [[ $LAB_NAMESPACES == 1 ]]; then "$LAB_DIR/at" "$@"; else "${@:2}"; fi
}

# A namespace per host, joined by a bridge on `head`. Processes keep theirs; the names are removed by `down`.
start_hosts() {
  local name i=0 net=bft$LAB_PORT
  printf '127.0.0.1 localhost\n10.77.0.1 head\n' >"$LAB_DIR/hosts"
  cat >"$LAB_DIR/at" <<END
#!/bin/sh
# Runs a command on a host of the cluster: at HOST COMMAND …
host=\$1 && shift
exec nsenter --net="/run/netns/$net-\$host" unshare --uts --mount \
  sh -c 'hostname "\$1" && mount --bind "$LAB_DIR/hosts" /etc/hosts && shift && exec "\$@"' sh "\$host" "\$@"
END
  chmod 755 "$LAB_DIR/at"
  ip netns add "$net-head"
  ip -n "$net-head" link set lo up
  for name in br0:10.77.0.1 hidden0:10.78.0.1; do
    ip -n "$net-head" link add "${name%:*}" type bridge
    ip -n "$net-head" addr add "${name#*:}/24" dev "${name%:*}"
    ip -n "$net-head" link set "${name%:*}" up
  done
  for name in $(node_names); do
    i=$((i + 1))
    echo "10.77.0.$((10 + i)) $name" >>"$LAB_DIR/hosts"
    ip netns add "$net-$name"
    ip -n "$net-$name" link set lo up
    ip -n "$net-head" link add "to-$name" type veth peer name eth0 netns "$net-$name"
    ip -n "$net-head" link set "to-$name" master br0 up
    ip -n "$net-$name" addr add "10.77.0.$((10 + i))/24" dev eth0
    ip -n "$net-$name" link set eth0 up
  done
}

end_hosts() {
  local name
  for name in $(ip netns list 2>/dev/null | grep -o "^bft$LAB_PORT-[a-z0-9]*" || true); do ip netns del "$name" || true; done
}

# n01, n02, …: all names of one length, so that they sort.
node_names() { seq -f "n%0$( ((count > 99)) && echo 3 || echo 2 )g" 1 "$count"; }

# The lines of nodes $1 = n[01-08] with ports $2, hosts $3 and addresses $4; one line for each node where GRES differ.
write_nodes() {
  local hardware="CPUs=$LAB_CPUS RealMemory=$LAB_MEMORY State=UNKNOWN" name gres i=0 address=$4 host=$3
  if [[ -z $LAB_GRES ]]; then
    echo "NodeName=$1 NodeHostname=$3 NodeAddr=$4 Port=$2 $hardware"
    return
  fi
  for name in $(node_names); do
    i=$((i + 1)) gres=$(gres_of $i)
    if [[ $LAB_NAMESPACES == 1 ]]; then host=$name address=10.77.0.$((10 + i)); fi
    echo "NodeName=$name NodeHostname=$host NodeAddr=$address Port=$((LAB_PORT + i)) ${gres:+Gres=$gres} $hardware"
  done
}

# The GRES of node number $1.
gres_of() {
  local words
  read -ra words <<<"$LAB_GRES"
  [[ ${words[$1 - 1]:--} == - ]] || echo "${words[$1 - 1]}"
}

# Lines of gres.conf; makes the devices.
write_gres() {
  local name part i=0 first last words
  for name in $(node_names); do
    i=$((i + 1)) first=0
    mkdir -p "$LAB_DIR/devices/$name"
    for part in $(gres_of $i | tr , ' '); do
      IFS=: read -ra words <<<"$part"
      last=$((first + words[-1] - 1))
      for ((; first <= last; first++)); do ln -sf /dev/null "$LAB_DIR/devices/$name/${words[0]}$first"; done
      echo "NodeName=$name Name=${words[0]}$( ((${#words[@]} == 3)) && echo " Type=${words[1]}" )" \
        "File=$LAB_DIR/devices/$name/${words[0]}[$((last - words[-1] + 1))-$last]"
    done
  done
}

write_conf() {
  local first last ports hosts=localhost addresses=127.0.0.1 accounting='AccountingStorageType=accounting_storage/none' nodes
  first=$(node_names | head -n 1) last=$(node_names | tail -n 1)
  nodes="n[${first#n}-${last#n}]" ports="[$((LAB_PORT + 1))-$((LAB_PORT + count))]"
  ((count == 1)) && nodes=$first ports=$((LAB_PORT + 1))
  if [[ $LAB_NAMESPACES == 1 ]]; then hosts=$nodes addresses="10.77.0.[11-$((10 + count))]"; fi
  if [[ $LAB_ACCOUNTING == 1 ]]; then
    accounting="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((LAB_PORT + 901))
AccountingStoragePass=$run/munge.sock"
  fi
  cat <<END
ClusterName=lab
SlurmctldHost=$( [[ $LAB_NAMESPACES == 1 ]] && echo 'head(10.77.0.1)' || echo "$(hostname -s)(127.0.0.1)" )
SlurmctldPort=$LAB_PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$run/munge.sock
StateSaveLocation=$LAB_DIR/ctld
SlurmdSpoolDir=$LAB_DIR/spool/%n
SlurmctldPidFile=$run/slurmctld.pid
SlurmdPidFile=$run/slurmd.%n.pid
SlurmctldLogFile=$log/slurmctld.log
SlurmdLogFile=$log/slurmd.%n.log
ProctrackType=$LAB_PROCTRACK
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=60
KillWait=$LAB_KILLWAIT
MessageTimeout=$LAB_TIMEOUT
Epilog=$LAB_DIR/epilog.sh
SchedulerType=sched/backfill
SchedulerParameters=$LAB_SCHEDULER
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=$LAB_PREEMPT
${LAB_PARAMETERS:+SlurmctldParameters=$LAB_PARAMETERS}
${LAB_TOPOLOGY:+TopologyPlugin=topology/tree}
JobCompType=jobcomp/filetxt
JobCompLoc=$log/jobcomp.log
$accounting
${LAB_GRES:+GresTypes=gpu}
$(write_nodes "$nodes" "$ports" "$hosts" "$addresses")
PartitionName=main Nodes=ALL Default=YES OverSubscribe=EXCLUSIVE DefaultTime=60 MaxTime=INFINITE State=UP $LAB_MAIN
PartitionName=scavenger Nodes=ALL OverSubscribe=EXCLUSIVE DefaultTime=60 MaxTime=INFINITE State=UP $LAB_SCAVENGER
$LAB_EXTRA
END
}

# Without cgroups, a process that has left its job's tree would outlive the job. slurmd runs this when a job ends; it
# finds such processes by what their environment says of job, node and cluster. That takes long on a machine that is all
# nodes at once, and nobody shall wait for it: with cgroups, the kernel does it.
write_epilog() {
  cat <<'END'
#!/bin/bash
if [[ ${1:-} != sweep ]]; then
  setsid nice -n 19 "$0" sweep </dev/null >/dev/null 2>&1 &
  exit 0
fi
for file in $(grep -lzxF "SLURM_JOB_ID=$SLURM_JOB_ID" /proc/[0-9]*/environ 2>/dev/null); do
  grep -qzxF "SLURMD_NODENAME=$SLURMD_NODENAME" "$file" 2>/dev/null || continue
  grep -qzxF "SLURM_CONF=$SLURM_CONF" "$file" 2>/dev/null || continue
  grep -qz '^SLURM_SCRIPT_CONTEXT=' "$file" 2>/dev/null && continue # this very script
  pid=${file#/proc/}
  kill -KILL "${pid%/environ}" 2>/dev/null
done
exit 0
END
}

# How many nodes are up and answer.
usable() { at head sinfo -h -N -p main -o '%T' 2>/dev/null | grep -vcE 'down|drain|fail|inval|unk|boot|power|\*' || true; }

all_run() {
  local name
  pid_of "$run/munged.pid" munged >/dev/null && pid_of "$run/slurmctld.pid" slurmctld >/dev/null || return 1
  for name in $(node_names); do pid_of "$run/slurmd.$name.pid" slurmd >/dev/null || return 1; done
}

start_accounting() {
  local i client=(mariadb --no-defaults -u root -S "$run/db.sock")
  if [[ ! -d $LAB_DIR/db/mysql ]]; then
    mariadb-install-db --no-defaults --user=root --datadir="$LAB_DIR/db" --auth-root-authentication-method=normal \
      --skip-test-db >"$log/mariadb-install.log" 2>&1 || fail "cannot make a database, see $log/mariadb-install.log"
  fi
  setsid mariadbd --no-defaults --user=root --datadir="$LAB_DIR/db" --socket="$run/db.sock" \
    --pid-file="$run/mariadbd.pid" --bind-address=127.0.0.1 --port=$((LAB_PORT + 902)) \
    --log-error="$log/mariadb.log" </dev/null >/dev/null 2>&1 &
  for ((i = 0; i < 300; i++)); do "${client[@]}" -e 'select 1' >/dev/null 2>&1 && break; sleep 0.1; done
  "${client[@]}" -e "create database if not exists slurm_acct_db;
    create user if not exists slurm@'127.0.0.1' identified by 'slurm';
    create user if not exists slurm@localhost identified by 'slurm';
    grant all on slurm_acct_db.* to slurm@'127.0.0.1';
    grant all on slurm_acct_db.* to slurm@localhost" || fail "the database does not answer, see $log/mariadb.log"
  (umask 077; cat >"$LAB_DIR/slurmdbd.conf") <<END
AuthType=auth/munge
AuthInfo=socket=$run/munge.sock
DbdHost=$(hostname -s)
DbdAddr=127.0.0.1
DbdPort=$((LAB_PORT + 901))
SlurmUser=root
LogFile=$log/slurmdbd.log
PidFile=$run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((LAB_PORT + 902))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
END
  slurmdbd </dev/null >"$log/slurmdbd.out" 2>&1 || fail "slurmdbd: $(<"$log/slurmdbd.out")"
  for ((i = 0; i < 100; i++)); do sacctmgr -n show cluster >/dev/null 2>&1 && return 0; sleep 0.1; done
  fail "slurmdbd does not answer, see $log/slurmdbd.log"
}

start_slurmctld() {
  # -c: no jobs of before; job ids go on counting.
  at head slurmctld "$@" -f "$conf" </dev/null >"$log/slurmctld.out" 2>&1 ||
    fail "slurmctld: $(tail -qn 3 "$log/slurmctld.out" "$log/slurmctld.log" 2>/dev/null)"
}

start_slurmd() {
  at "$1" slurmd -c -N "$1" -f "$conf" </dev/null >"$log/slurmd.$1.out" 2>&1 ||
    fail "slurmd $1: $(tail -qn 3 "$log/slurmd.$1.out" "$log/slurmd.$1.log" 2>/dev/null)"
}

up() {
  count=${1:-8}
  [[ $count =~ ^[1-9][0-9]*$ ]] && ((count <= 500)) || fail "the number of nodes must be from 1 to 500, but got $count"
  prepare
  if [[ -f $conf ]] && write_conf | cmp -s - "$conf" && all_run && (($(usable) == count)); then
    echo "already up: $count nodes"
    return 0
  fi
  down >/dev/null
  local name i
  trap 'down >/dev/null 2>&1 || true' EXIT # a start that fails leaves nothing
  write_conf >"$conf"
  # slurmd loads a cgroup plugin even where nothing uses one; that of v1 does nothing until it is used.
  echo CgroupPlugin=cgroup/v1 >"$LAB_DIR/cgroup.conf"
  if [[ -n $LAB_GRES ]]; then write_gres >"$LAB_DIR/gres.conf"; fi
  if [[ -n $LAB_TOPOLOGY ]]; then printf '%s\n' "$LAB_TOPOLOGY" >"$LAB_DIR/topology.conf"; fi
  write_epilog >"$LAB_DIR/epilog.sh"
  chmod 755 "$LAB_DIR/epilog.sh"
  for name in $(node_names); do mkdir -p "$LAB_DIR/spool/$name"; done
  if [[ $LAB_NAMESPACES == 1 ]]; then start_hosts; fi
  [[ -s $LAB_DIR/munge.key ]] || (umask 077; head -c 1024 /dev/urandom >"$LAB_DIR/munge.key")
  munged --force --num-threads=10 --key-file="$LAB_DIR/munge.key" --socket="$run/munge.sock" \
    --pid-file="$run/munged.pid" --log-file="$log/munged.log" --seed-file="$LAB_DIR/munge.seed" \
    </dev/null >/dev/null 2>"$log/munged.err" || fail "munged: $(<"$log/munged.err")"
  if [[ $LAB_ACCOUNTING == 1 ]]; then start_accounting; fi
  start_slurmctld -c
  for name in $(node_names); do start_slurmd "$name"; done
  for ((i = 0; i < 600; i++)); do
    if (($(usable) == count)); then
      trap - EXIT
      echo "up: $count nodes; SLURM_CONF=$conf"
      return 0
    fi
    ((i < 50)) || all_run || fail "a daemon has ended (is a port in use?), see $log"
    sleep 0.1
  done
  fail "only $(usable) of $count nodes answer, see $log"
}

prepare() {
  ((EUID == 0)) || fail "must be run by root"
  umask 022
  mkdir -p "$LAB_DIR"/{ctld,spool} "$log" "$run"
  install_missing
  if [[ $LAB_NAMESPACES == 1 ]]; then
    command -v ip >/dev/null || fail "the command ip is missing (package iproute2)"
    unshare --net --uts --mount ip link add br0 type bridge 2>"$log/namespaces" ||
      fail "network namespaces cannot be made here: $(tail -n 1 "$log/namespaces")"
    ((${count:-1} <= 200)) || fail "with LAB_NAMESPACES there are at most 200 nodes, but got $count"
    [[ $LAB_ACCOUNTING != 1 ]] || fail "LAB_NAMESPACES and LAB_ACCOUNTING cannot be combined"
  fi
}

# slurmstepd and what jobs started outlive slurmd. Those of this cluster say so in their environment.
leftovers() {
  local file program
  for file in $(grep -lzxF "SLURM_CONF=$conf" /proc/[0-9]*/environ 2>/dev/null); do
    program=$(readlink "${file%environ}exe" 2>/dev/null) || continue
    if [[ ${program##*/} == slurmstepd* ]] || grep -qz '^SLURMD_NODENAME=' "$file" 2>/dev/null; then
      file=${file#/proc/}
      echo "${file%/environ}"
    fi
  done
}

down() {
  local file i pid jobs
  [[ -d $run ]] || { echo down; return 0; }
  if pid=$(pid_of "$run/slurmctld.pid" slurmctld) && pid_of "$run/munged.pid" munged >/dev/null; then
    kill -CONT "$pid" 2>/dev/null || true # a test may have stopped it
    for file in main scavenger; do at head timeout 5 scontrol update PartitionName=$file State=DOWN >/dev/null 2>&1 || true; done
    jobs=$(at head timeout 5 squeue -h -o %A 2>/dev/null | sort -u || true)
    if [[ -n $jobs ]]; then
      # shellcheck disable=SC2086
      { at head timeout 10 scancel --full --signal=KILL $jobs; at head timeout 10 scancel $jobs; } >/dev/null 2>&1 || true
    fi
    for ((i = 0; i < 50; i++)); do
      [[ -z $(at head timeout 5 squeue -h -o %A 2>/dev/null || true) ]] && break
      sleep 0.1
    done
  fi
  for file in "$run"/slurmd.*.pid; do [[ -e $file ]] && end "$file" slurmd & done
  wait
  end "$run/slurmctld.pid" slurmctld
  for pid in $(leftovers); do kill -KILL "$pid" 2>/dev/null || true; done
  end "$run/slurmdbd.pid" slurmdbd
  end "$run/mariadbd.pid" mariadbd
  end "$run/munged.pid" munged
  if [[ $LAB_NAMESPACES == 1 ]]; then end_hosts; fi
  echo down
}

status() {
  local name file running=0 pid wanted
  [[ -f $conf ]] || { echo "down: nothing was started in $LAB_DIR"; return 3; }
  for name in munged slurmctld slurmdbd mariadbd; do
    if pid=$(pid_of "$run/$name.pid" "$name"); then echo "$name: pid $pid"; fi
  done
  for file in "$run"/slurmd.*.pid; do pid_of "$file" slurmd >/dev/null && running=$((running + 1)); done
  echo "slurmd: $running"
  pid_of "$run/slurmctld.pid" slurmctld >/dev/null || { echo down; return 3; }
  at head sinfo
  at head squeue
  wanted=$(at head sinfo -h -N -p main -o %N | wc -l)
  (($(usable) == wanted))
}

# One at a time. flock -o: the daemons must not inherit the lock.
case ${1:-} in
  up | down | install)
    ((${#LAB_DIR} <= 70)) || fail "LAB_DIR must have at most 70 characters, but got $LAB_DIR"
    if [[ ${LAB_LOCKED:-} != "$LAB_DIR" ]]; then
      mkdir -p "$LAB_DIR"
      LAB_LOCKED=$LAB_DIR exec flock -o "$LAB_DIR/.lock" bash "$0" "$@"
    fi
    ;;
esac
case ${1:-} in
  up) up "${2:-}" ;;
  down) down ;;
  status) status ;;
  env) echo "export SLURM_CONF=$conf" ;;
  install) prepare ;;
  *) sed -n '2,32p' "$0"; exit 2 ;;
esac
