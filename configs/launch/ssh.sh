#!/usr/bin/env bash
# A run over plain SSH: coordinator and islands each on hosts of their own, started from anywhere.
# Every host has diloco on its PATH and the same run.toml in $directory; its coordinator section is
# as in slurm.sbatch. Edit the three values below.
#
#   ./ssh.sh start     the coordinator, then every island
#   ./ssh.sh resume    the same, from the newest checkpoint
#   ./ssh.sh stop      a checkpoint on every island, then the end

set -euo pipefail
directory=diloco
coordinator=head.example.org:4711
islands=(
    # name     its hosts, the first one first
    "eu-west   gpu1.eu.example.org gpu2.eu.example.org"
    "us-east   gpu1.us.example.org"
)

on() { # on HOST LOG COMMAND: leave a command running there, whatever becomes of this connection
    ssh "$1" "cd $directory || exit; nohup $3 </dev/null >>$2 2>&1 & echo \$! >$2.pid"
}

start() { # start [OPTION of the coordinator]
    on "${coordinator%:*}" coordinator.log "diloco coordinator run.toml $1"
    sleep 10
    for line in "${islands[@]}"; do
        read -r name hosts <<<"$line"
        set -- $hosts
        first=$1 index=0
        for host in "$@"; do
            on "$host" "island-$name.log" "diloco island run.toml --island $name \
                --coordinator $coordinator --nnodes $# --node-rank $index --rdzv $first:29400"
            index=$((index + 1))
        done
    done
    diloco status "$coordinator"
}

case ${1:-} in
start) start "" ;;
resume) start "--resume" ;;
stop) ssh "${coordinator%:*}" "kill -TERM \$(cat $directory/coordinator.log.pid)" ;;
*) sed -n '2,9s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
