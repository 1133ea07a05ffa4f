# Runs a batch script on Slurm, with two nodes on this machine, and prints its output.
# Run this script as root, so that nothing remains when it ends:
# `unshare --mount --pid --fork --kill-child --mount-proc sh slurm.sh FOLDER SCRIPT`.
set -e
folder=$1
script=$2
export SLURM_CONF="$folder/slurm.conf"
mkdir "$folder/state" "$folder/node1" "$folder/node2"
cat > "$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort=17100
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmdSpoolDir=$folder/%n
StateSaveLocation=$folder/state
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName=node1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17101 CPUs=2
NodeName=node2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17102 CPUs=2
PartitionName=all Nodes=ALL Default=YES
CONF
{ cat /etc/hosts; echo "127.0.0.1 node1 node2"; } > "$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
slurmctld
slurmd -N node1
slurmd -N node2
until [ "$(sinfo --noheader --states=idle --Format=nodes | tr -d ' ')" = 2 ]; do
  sleep 0.2
done
status=0
sbatch --wait --quiet --output="$folder/said" --chdir="$PWD" "$script" || status=$?
cat "$folder/said"
exit $status
