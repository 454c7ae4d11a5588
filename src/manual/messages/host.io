# virt-pin gather /host.txt
virt-pin: error[host.io]: cannot write /host.txt: File exists (os error 17)
  hint: look at the path and the reason in the message
